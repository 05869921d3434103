package proc

import (
	"bytes"
	"context"
	"sync"
	"time"
)

// The output policy. A command's output goes through a hub to any number of
// readers (the streams of Start and Connect).
//
//   - While at least one reader is attached nothing is dropped: each reader has
//     a bounded queue, and when one is full the command's pipe is not read until
//     there is room. The slowest reader sets the pace.
//   - A reader that goes away stops counting at once. If it was the last one,
//     what stood in its queue is kept.
//   - While no reader is attached the command is never blocked: the last
//     backlogBytes of its output are kept, and older ones dropped. The next
//     reader gets them first.
//
// So each byte reaches every reader that was attached when it was written, and
// one that nobody was there to take reaches the next reader, unless more than
// backlogBytes followed it.
//
// Of a terminal the last scrollBytes are kept beside that, read or not: a reader
// that asks for scrollback gets them first, so that one who reattaches sees the
// screen that was left. E2B's envd has no such thing, so nobody gets it unasked.
const (
	queueBytes   = 256 << 10 // of one reader
	backlogBytes = 256 << 10 // of one command without readers
	chunkBytes   = 64 << 10  // of one read, and the most that one event carries
	scrollBytes  = 64 << 10  // of one terminal
	itemOverhead = 128       // what a queued chunk costs beside its bytes
)

// stream is which output a chunk is of.
type stream uint8

const (
	stdout stream = iota
	stderr
	terminal
)

// chunk is some output. Its bytes are never changed once it is out of a queue.
type chunk struct {
	of   stream
	data []byte
	own  bool // data belongs to this queue alone and may be appended to
}

// hub fans one command's output out to its readers.
type hub struct {
	mu      sync.Mutex
	room    sync.Cond // a queue got shorter, or a reader left
	readers map[*reader]struct{}
	backlog queue
	scroll  scrollback
	end     *ending
}

// ending is how a command ended.
type ending struct {
	code   int32
	exited bool
	status string
}

func newHub() *hub {
	h := &hub{readers: map[*reader]struct{}{}}
	h.room.L = &h.mu
	return h
}

// queue is chunks in order, and their cost in bytes.
type queue struct {
	items []chunk
	cost  int
}

// push adds data, which it may keep. Small chunks of one stream are joined, so
// that a command that writes byte by byte does not cost an item per byte.
func (q *queue) push(of stream, data []byte) {
	if n := len(q.items); n > 0 {
		if last := &q.items[n-1]; last.of == of && len(last.data)+len(data) <= chunkBytes {
			if !last.own {
				last.data = append(make([]byte, 0, min(chunkBytes, 2*(len(last.data)+len(data)))), last.data...)
				last.own = true
			}
			last.data = append(last.data, data...)
			q.cost += len(data)
			return
		}
	}
	q.items = append(q.items, chunk{of: of, data: data})
	q.cost += len(data) + itemOverhead
}

// trim drops the oldest chunks until the queue costs at most limit.
func (q *queue) trim(limit int) {
	drop := 0
	for q.cost > limit && drop < len(q.items) {
		q.cost -= len(q.items[drop].data) + itemOverhead
		drop++
	}
	if drop > 0 {
		q.items = append([]chunk(nil), q.items[drop:]...)
	}
}

// publish gives data, which it may keep, to every reader, and blocks while the
// queue of one is full.
func (h *hub) publish(of stream, data []byte) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for h.full() {
		h.room.Wait()
	}
	if of == terminal {
		h.scroll.write(data)
	}
	if len(h.readers) == 0 {
		h.backlog.push(of, data)
		h.backlog.trim(backlogBytes)
		return
	}
	for r := range h.readers {
		r.queue.push(of, data)
		r.notify()
	}
}

func (h *hub) full() bool {
	for r := range h.readers {
		if r.queue.cost >= queueBytes {
			return true
		}
	}
	return false
}

// finish tells the end; nothing is published after it.
func (h *hub) finish(e ending) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.end = &e
	for r := range h.readers {
		r.notify()
	}
}

// reader is one attached stream.
type reader struct {
	hub   *hub
	queue queue
	ready chan struct{} // something is there
}

func (r *reader) notify() {
	select {
	case r.ready <- struct{}{}:
	default:
	}
}

// attach adds a reader, which gets the backlog first, and before that as much of
// a terminal's last output as makes scroll bytes with it.
func (h *hub) attach(scroll int) *reader {
	r := &reader{hub: h, ready: make(chan struct{}, 1)}
	h.mu.Lock()
	defer h.mu.Unlock()
	unread := 0
	for _, c := range h.backlog.items {
		unread += len(c.data)
	}
	if seen := h.scroll.last(scroll); len(seen) > unread {
		r.queue.push(terminal, bytes.Clone(seen[:len(seen)-unread]))
	}
	for _, c := range h.backlog.items {
		r.queue.push(c.of, c.data)
	}
	h.backlog = queue{}
	h.readers[r] = struct{}{}
	r.notify()
	return r
}

// detach removes the reader. If it was the last, what it did not take is kept.
func (r *reader) detach() {
	h := r.hub
	h.mu.Lock()
	defer h.mu.Unlock()
	if _, ok := h.readers[r]; !ok {
		return
	}
	delete(h.readers, r)
	if len(h.readers) == 0 && len(r.queue.items) > 0 {
		h.backlog = r.queue
		h.backlog.trim(backlogBytes)
	}
	r.queue = queue{}
	h.room.Broadcast()
}

// next takes the next chunk. Where there is none it waits: for ctx, whose
// error it returns; or for tick, when it returns neither a chunk nor an end.
// The end comes after the last chunk.
func (r *reader) next(ctx context.Context, tick <-chan time.Time) (*chunk, *ending, error) {
	for {
		if c, e := r.take(); c != nil || e != nil {
			return c, e, nil
		}
		select {
		case <-r.ready:
		case <-tick:
			return nil, nil, nil
		case <-ctx.Done():
			return nil, nil, ctx.Err()
		}
	}
}

func (r *reader) take() (*chunk, *ending) {
	h := r.hub
	h.mu.Lock()
	defer h.mu.Unlock()
	q := &r.queue
	if len(q.items) == 0 {
		return nil, h.end
	}
	c := q.items[0]
	q.items[0] = chunk{}
	q.items = q.items[1:]
	if len(q.items) == 0 {
		q.items = nil
	}
	q.cost -= len(c.data) + itemOverhead
	h.room.Broadcast()
	return &c, nil
}

// kept is the cost of the backlog and the scrollback in bytes.
func (h *hub) kept() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.backlog.cost + cap(h.scroll.data)
}

// scrollback is the end of a terminal's output.
type scrollback struct {
	data []byte // the last scrollBytes of it, and before them up to as many again
	cut  bool   // there was more
}

func (s *scrollback) write(p []byte) {
	if len(s.data)+len(p) > 2*scrollBytes {
		s.cut = true
		if len(p) >= scrollBytes {
			s.data, p = s.data[:0], p[len(p)-scrollBytes:]
		} else {
			s.data = s.data[:copy(s.data, s.data[len(s.data)-min(len(s.data), scrollBytes):])]
		}
	}
	s.data = append(s.data, p...)
}

// last gives up to n of the last bytes, at most scrollBytes. Where there were
// more they begin with a line, if there is one, and not in the middle of a
// character or an escape sequence.
func (s *scrollback) last(n int) []byte {
	n = min(max(n, 0), scrollBytes)
	out := s.data
	if len(out) > n {
		out = out[len(out)-n:]
	} else if !s.cut {
		return out
	}
	if i := bytes.IndexByte(out, '\n'); i >= 0 {
		return out[i+1:]
	}
	return out
}
