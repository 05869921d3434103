package api

import (
	"context"
	"net/http"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/warrenhq/warren/internal/manager"
	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/version"
)

// metrics is what /metrics tells. Labels are of bounded sets only: nothing
// that a client chooses freely becomes one.
type metrics struct {
	registry *prometheus.Registry
	creates  *prometheus.CounterVec
	start    *prometheus.HistogramVec
	events   *prometheus.CounterVec
	latency  *prometheus.HistogramVec
}

func newMetrics(h Host) *metrics {
	m := &metrics{
		registry: prometheus.NewRegistry(),
		creates: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "warren_creates_total", Help: "Creates of sandboxes, copies by forks too, by runtime and result: ok, or the error's code.",
		}, []string{"runtime", "result"}),
		start: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "warren_create_duration_seconds", Help: "Time from a create's request to its answer, of those that came to run.",
			Buckets: []float64{.005, .01, .025, .05, .1, .2, .3, .5, .75, 1, 2, 5, 10, 30},
		}, []string{"runtime", "start"}),
		events: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "warren_events_total", Help: "Events of sandboxes by type, state reached and reason.",
		}, []string{"type", "to", "reason"}),
		latency: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "warren_http_request_duration_seconds", Help: "Time to the end of the answer by route; streams last as long as they last.",
			Buckets: []float64{.0005, .001, .002, .003, .005, .01, .015, .025, .05, .1, .25, .5, 1, 2.5, 10, 60},
		}, []string{"route", "status"}),
	}
	build := prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "warren_build_info", Help: "Always 1; the label tells the version.", ConstLabels: prometheus.Labels{"version": version.Version},
	})
	build.Set(1)
	m.registry.MustRegister(m.creates, m.start, m.events, m.latency, build, capacityCollector{h},
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return m
}

func (m *metrics) handler() http.Handler {
	return promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{})
}

func (m *metrics) observe(route string, status int, took time.Duration) {
	m.latency.WithLabelValues(route, strconv.Itoa(status)).Observe(took.Seconds())
}

// runtimes are the names that may become labels though no sandbox runs there:
// what a client asks for is any string.
var runtimes = map[string]bool{"container": true, "gvisor": true, "isolate": true, "microvm": true, "kata": true, "libkrun": true}

// created counts one create.
func (m *metrics) created(asked string, sb sandbox.Sandbox, err error, took time.Duration) {
	result, runtime := "ok", sb.Runtime
	if err != nil {
		result = string(sandbox.CodeOf(err))
		if runtime == "" && runtimes[asked] {
			runtime = asked
		}
	}
	m.creates.WithLabelValues(runtime, result).Inc()
	if err == nil {
		m.start.WithLabelValues(runtime, string(sb.Start)).Observe(took.Seconds())
	}
}

// forked counts the copies of one fork.
func (m *metrics) forked(results []manager.ForkResult) {
	runtime := ""
	for _, r := range results {
		if r.Err == nil {
			runtime = r.Sandbox.Runtime // all are of one capture, and so of one runtime
		}
	}
	for _, r := range results {
		result := "ok"
		if r.Err != nil {
			result = string(r.Err.Code)
		}
		m.creates.WithLabelValues(runtime, result).Inc()
	}
}

func (m *metrics) event(e sandbox.Event) {
	m.events.WithLabelValues(string(e.Type), string(e.To), string(e.Reason)).Inc()
}

// capacityCollector reads the host's budget when it is asked for.
type capacityCollector struct{ h Host }

var (
	descSandboxes = prometheus.NewDesc("warren_sandboxes", "Live sandboxes by state.", []string{"state"}, nil)
	descByRuntime = prometheus.NewDesc("warren_sandboxes_by_runtime", "Live sandboxes by runtime.", []string{"runtime"}, nil)
	descBudget    = prometheus.NewDesc("warren_budget", "What live sandboxes may be promised together: bytes of memory, processes, network slots, creates at work.", []string{"resource"}, nil)
	descPromised  = prometheus.NewDesc("warren_budget_used", "What of the budget is promised or in use.", []string{"resource"}, nil)
	descDiskFree  = prometheus.NewDesc("warren_disk_free_bytes", "Free bytes of the state directory's filesystem.", nil, nil)
	descMemAvail  = prometheus.NewDesc("warren_host_memory_available_bytes", "Memory that the host can still give without swapping.", nil, nil)
)

func (c capacityCollector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{descSandboxes, descByRuntime, descBudget, descPromised, descDiskFree, descMemAvail} {
		ch <- d
	}
}

func (c capacityCollector) Collect(ch chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	cap := c.h.Capacity(ctx)
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	for _, s := range sandbox.States() {
		if !s.Ended() {
			gauge(descSandboxes, float64(cap.ByState[string(s)]), string(s))
		}
	}
	for name, n := range cap.ByRuntime {
		gauge(descByRuntime, float64(n), name)
	}
	for _, b := range []struct {
		name         string
		budget, used float64
	}{
		{"memory", float64(cap.MemoryBudget), float64(cap.MemoryPromised)},
		{"processes", float64(cap.ProcessBudget), float64(cap.ProcessPromised)},
		{"slots", float64(cap.Slots), float64(cap.SlotsUsed)},
		{"creates", float64(cap.CreatesMax), float64(cap.CreatesInFlight)},
	} {
		gauge(descBudget, b.budget, b.name)
		gauge(descPromised, b.used, b.name)
	}
	gauge(descDiskFree, float64(cap.DiskFree))
	gauge(descMemAvail, float64(cap.MemoryAvailable))
}
