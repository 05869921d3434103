package agent

import (
	"bytes"
	"strings"
	"testing"
)

func FuzzParseInit(f *testing.F) {
	f.Add([]byte(`{"envVars":{"A":"b"},"accessToken":"t","timestamp":"2026-01-02T03:04:05Z","hostname":"box","nameservers":["10.0.0.1"],"hosts":[{"address":"::1","names":["a"]}],"volumeMounts":[],"hyperloopIP":"x"}`))
	f.Add([]byte(` `))
	f.Add([]byte(`{"hostname":"a\nb"}`))
	f.Fuzz(func(t *testing.T, body []byte) {
		r, err := parseInit(bytes.NewReader(body))
		if err != nil {
			return
		}
		for _, s := range append([]string{r.Hostname, r.AccessToken, r.SandboxID}, r.Search...) {
			if strings.ContainsAny(s, "\n\r\x00") {
				t.Errorf("%q was let in", s)
			}
		}
		for k, v := range r.EnvVars {
			if strings.ContainsAny(k, "=\x00") || strings.ContainsRune(v, 0) {
				t.Errorf("%q=%q was let in", k, v)
			}
		}
	})
}

func FuzzParseProc(f *testing.F) {
	f.Add([]byte("cpu  1 2 3 4 5 6 7 8 9 10\ncpu0 1 2\n"), []byte("MemTotal: 10 kB\nMemAvailable: 5 kB\n"))
	f.Fuzz(func(t *testing.T, stat, meminfo []byte) {
		busy, total, ok := parseStat(stat)
		if ok && busy > total && total > 1<<62 {
			t.Skip("overflow")
		}
		parseMeminfo(meminfo)
	})
}

func TestCPUMeter(t *testing.T) {
	var c cpuMeter
	now := c.at.AddDate(2000, 0, 0)
	c.read(now, []byte("cpu 100 0 100 800 0 0 0 0\n"))
	if got := c.read(now.Add(2e9), []byte("cpu 200 0 200 900 0 0 0 0\n")); got != 100 {
		t.Errorf("200 ticks in 2 s are %v %%", got)
	}
	if got := c.read(now.Add(2e9+1), []byte("cpu 999 0 999 900 0 0 0 0\n")); got != 100 {
		t.Errorf("at once: %v %%", got)
	}
}
