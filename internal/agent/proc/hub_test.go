package proc

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"testing"
	"time"
)

// collect takes all of a reader until the end.
func collect(t *testing.T, r *reader, slow func()) map[stream][]byte {
	got := map[stream][]byte{}
	for {
		c, e, err := r.next(t.Context(), nil)
		if err != nil {
			t.Error(err)
			return got
		}
		if e != nil {
			return got
		}
		got[c.of] = append(got[c.of], c.data...)
		if slow != nil {
			slow()
		}
	}
}

func TestHubNothingLostOrReordered(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	h := newHub()
	var want = map[stream][]byte{}
	var parts []chunk
	for range 3000 {
		of := stream(rng.IntN(2))
		data := make([]byte, 1+rng.IntN(1<<rng.IntN(15)))
		for i := range data {
			data[i] = byte(rng.Uint32())
		}
		want[of] = append(want[of], data...)
		parts = append(parts, chunk{of: of, data: data})
	}
	readers := []*reader{h.attach(0), h.attach(0), h.attach(0)}
	got := make([]map[stream][]byte, len(readers))
	var wg sync.WaitGroup
	for i, r := range readers {
		wg.Go(func() {
			n := 0
			got[i] = collect(t, r, func() {
				if n++; i == 0 && n%50 == 0 {
					time.Sleep(time.Millisecond)
				}
			})
		})
	}
	left := h.attach(0) // one that takes nothing and goes away
	time.AfterFunc(20*time.Millisecond, left.detach)
	for _, p := range parts {
		h.publish(p.of, bytes.Clone(p.data))
		h.mu.Lock()
		for r := range h.readers {
			if r.queue.cost > queueBytes+chunkBytes+itemOverhead {
				t.Errorf("a queue of %d bytes", r.queue.cost)
			}
		}
		h.mu.Unlock()
	}
	h.finish(ending{})
	wg.Wait()
	for i := range got {
		for _, of := range []stream{stdout, stderr} {
			if !bytes.Equal(got[i][of], want[of]) {
				t.Errorf("reader %d, stream %d: %d bytes, want %d", i, of, len(got[i][of]), len(want[of]))
			}
		}
	}
}

func TestHubBacklog(t *testing.T) {
	h := newHub()
	h.publish(stdout, []byte("before "))
	h.publish(stderr, []byte("err"))
	r := h.attach(0)
	c, _, _ := r.next(t.Context(), nil)
	if string(c.data) != "before " {
		t.Errorf("got %q", c.data)
	}
	// What the last reader did not take goes to the next, in order.
	h.publish(stderr, []byte(" more"))
	r.detach()
	r.detach() // idempotent
	h.publish(stdout, []byte("after"))
	h.finish(ending{code: 3})
	got := collect(t, h.attach(0), nil)
	if string(got[stdout]) != "after" || string(got[stderr]) != "err more" {
		t.Errorf("got %q", got)
	}
	// It was given out once.
	if got := collect(t, h.attach(0), nil); len(got) != 0 {
		t.Errorf("again: %q", got)
	}
}

func TestHubBacklogIsBounded(t *testing.T) {
	h := newHub()
	for i := range 100 {
		h.publish(stdout, bytes.Repeat([]byte{byte(i)}, chunkBytes))
	}
	for range 1 << 20 {
		h.publish(stderr, []byte{'x'})
	}
	h.publish(stdout, []byte("last"))
	if k := h.kept(); k > backlogBytes {
		t.Errorf("kept %d", k)
	}
	h.finish(ending{})
	got := collect(t, h.attach(0), nil)
	if !bytes.HasSuffix(got[stdout], []byte("last")) {
		t.Error("the newest was dropped")
	}
}

func TestHubSmallWritesAreJoined(t *testing.T) {
	h := newHub()
	r := h.attach(0)
	shared := h.attach(0)
	for range 10000 {
		h.publish(stdout, []byte{'x'})
	}
	if n := len(r.queue.items); n > 2 {
		t.Errorf("%d items", n)
	}
	h.finish(ending{})
	for _, r := range []*reader{r, shared} {
		if got := collect(t, r, nil); len(got[stdout]) != 10000 {
			t.Errorf("%d bytes", len(got[stdout]))
		}
	}
}

func TestHubWaits(t *testing.T) {
	h := newHub()
	r := h.attach(0)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, _, err := r.next(ctx, nil); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	tick := make(chan time.Time, 1)
	tick <- time.Now()
	if c, e, err := r.next(t.Context(), tick); c != nil || e != nil || err != nil {
		t.Errorf("got %v, %v, %v", c, e, err)
	}
}

func TestHubScrollback(t *testing.T) {
	h := newHub()
	read := func(r *reader) (out string) {
		t.Helper()
		for {
			c, _ := r.take()
			if c == nil {
				return out
			}
			out += string(c.data)
		}
	}
	publish := func(of stream, s string) { h.publish(of, []byte(s)) }
	r := h.attach(0)
	publish(terminal, "one\n")
	publish(terminal, "two\n")
	if got := read(r); got != "one\ntwo\n" {
		t.Errorf("%q", got)
	}
	publish(terminal, "three\n")
	r.detach()
	publish(terminal, "four\n")
	// Read before, then what nobody took: each once.
	r = h.attach(scrollBytes)
	if got := read(r); got != "one\ntwo\nthree\nfour\n" {
		t.Errorf("%q", got)
	}
	second := h.attach(len("o\nthree\nfour\n"))
	publish(terminal, "five\n")
	if got := read(second); got != "three\nfour\nfive\n" { // from the beginning of a line
		t.Errorf("%q", got)
	}
	unasked := h.attach(0)
	if got := read(unasked); got != "" {
		t.Errorf("unasked it gets %q", got)
	}
	unasked.detach()
	r.detach()
	// However much is written, the end of it is kept, and no more than that.
	rng := rand.New(rand.NewPCG(1, 0))
	var all []byte
	for range 400 {
		line := append(bytes.Repeat([]byte{byte('a' + rng.IntN(26))}, rng.IntN(3000)), '\n')
		all = append(all, line...)
		h.publish(terminal, bytes.Clone(line))
		read(second)
	}
	want := all[len(all)-scrollBytes:]
	want = want[bytes.IndexByte(want, '\n')+1:]
	if got := read(h.attach(1 << 30)); got != string(want) {
		t.Errorf("%d bytes of scrollback, want %d", len(got), len(want))
	}
	if n := cap(h.scroll.data); n > 3*scrollBytes {
		t.Errorf("it holds %d bytes", n)
	}
	// Pipes have none.
	h = newHub()
	r = h.attach(0)
	publish(stdout, "out\n")
	read(r)
	if got := read(h.attach(scrollBytes)); got != "" {
		t.Errorf("of a pipe %q", got)
	}
}
