package network

import (
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/warrenhq/warren/internal/sandbox"
)

// spread reports a benchmark's median and 99th percentile in milliseconds.
func spread(b *testing.B, name string, list []time.Duration) {
	b.Helper()
	if len(list) == 0 {
		return
	}
	slices.Sort(list)
	ms := func(p float64) float64 {
		return float64(list[min(int(p*float64(len(list))), len(list)-1)].Microseconds()) / 1000
	}
	b.ReportMetric(ms(0.5), name+"-p50-ms")
	b.ReportMetric(ms(0.99), name+"-p99-ms")
}

// BenchmarkSlot measures the steps of a slot's life: built (as the pool's
// worker or an Acquire on an empty pool does), acquired from the pool under a
// plain policy and one with rules, released.
func BenchmarkSlot(b *testing.B) {
	newWorld(b)
	n := open(b, func(c *Config) { c.PoolSize = -1 })
	rules := egress([]sandbox.EgressRule{cidr("10.200.0.0/16", 0), domain("*.example.com", 443)}, []sandbox.EgressRule{cidr("0.0.0.0/0", 0)})
	var built, plain, ruled, changed, released []time.Duration
	timed := func(into *[]time.Duration, f func() error) {
		begin := time.Now()
		if err := f(); err != nil {
			b.Fatal(err)
		}
		*into = append(*into, time.Since(begin))
	}
	i := 0
	for b.Loop() {
		timed(&built, func() error {
			s, _, err := n.construct(b.Context())
			n.mu.Lock()
			n.ready = append(n.ready, s)
			n.mu.Unlock()
			return err
		})
		p, into := egress(nil, nil), &plain
		if i++; i%2 == 0 {
			p, into = rules, &ruled
		}
		var l sandbox.Link
		timed(into, func() (err error) { l, err = n.Acquire(b.Context(), "sbxbench", p); return err })
		timed(&changed, func() error { return n.SetPolicy(b.Context(), l, rules) })
		timed(&released, func() error { return n.Release(b.Context(), l) })
	}
	spread(b, "build", built)
	spread(b, "acquire", plain)
	spread(b, "acquire-rules", ruled)
	spread(b, "setpolicy", changed)
	spread(b, "release", released)
}

// BenchmarkBurst measures 30 Acquires at once, with a pool of 8.
func BenchmarkBurst(b *testing.B) {
	newWorld(b)
	n := open(b, func(c *Config) { c.PoolSize = 8 })
	var each []time.Duration
	var mu sync.Mutex
	for b.Loop() {
		b.StopTimer()
		for n.wants() || func() bool { n.mu.Lock(); defer n.mu.Unlock(); return len(n.ready) < 8 }() {
			time.Sleep(5 * time.Millisecond)
		}
		b.StartTimer()
		var wg sync.WaitGroup
		var links []sandbox.Link
		for range 30 {
			wg.Go(func() {
				begin := time.Now()
				l, err := n.Acquire(b.Context(), "sbxbench", egress(nil, nil))
				if err != nil {
					b.Error(err)
				}
				mu.Lock()
				links, each = append(links, l), append(each, time.Since(begin))
				mu.Unlock()
			})
		}
		wg.Wait()
		b.StopTimer()
		for _, l := range links {
			if err := n.Release(b.Context(), l); err != nil {
				b.Error(err)
			}
		}
		b.StartTimer()
	}
	spread(b, "acquire", each)
}

// BenchmarkAcquireAmongMany measures whether a transaction costs more when
// many sandboxes, each with rules of its own, are in the table.
func BenchmarkAcquireAmongMany(b *testing.B) {
	newWorld(b)
	n := open(b, func(c *Config) { c.PoolSize = -1 })
	rules := compile(egress([]sandbox.EgressRule{cidr("10.200.0.0/16", 0), domain("*.example.com", 443)}, []sandbox.EgressRule{cidr("0.0.0.0/0", 0)}), specialPrefixes)
	plain := compile(egress(nil, nil), specialPrefixes)
	const many = 2000
	for s := 1000; s < 1000+many; s++ {
		if err := n.rules.apply(s, rules, nil); err != nil {
			b.Fatal(err)
		}
	}
	var asPlain, asRuled []time.Duration
	for b.Loop() {
		for _, c := range []struct {
			p    *policy
			into *[]time.Duration
		}{{plain, &asPlain}, {rules, &asRuled}} {
			begin := time.Now()
			if err := n.rules.apply(1, c.p, nil); err != nil {
				b.Fatal(err)
			}
			*c.into = append(*c.into, time.Since(begin))
			if err := n.rules.apply(1, nil, nil); err != nil {
				b.Fatal(err)
			}
		}
	}
	spread(b, "plain", asPlain)
	spread(b, "rules", asRuled)
	b.StopTimer()
	for s := 1000; s < 1000+many; s++ {
		if err := n.rules.apply(s, nil, nil); err != nil {
			b.Fatal(err)
		}
	}
}
