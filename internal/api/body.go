package api

import (
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strconv"
	"sync"
	"time"
)

// How slowly a body may come. A JSON body has to be there in whole after
// jsonBodyTimeout; of a stream, something has to come in streamIdleTimeout.
const (
	jsonBodyTimeout   = 30 * time.Second
	streamIdleTimeout = 2 * time.Minute
	rearmEvery        = 5 * time.Second
)

// timedBody puts a deadline on reading a request's body, and takes it away
// when the body has ended: a deadline left on the connection would look like
// the client's going away to a handler that still works.
type timedBody struct {
	io.ReadCloser
	rc      *http.ResponseController
	rolling bool // the deadline moves with what comes
	armed   time.Time
}

func (b *timedBody) Read(p []byte) (int, error) {
	now := time.Now()
	switch {
	case b.armed.IsZero() && !b.rolling:
		b.rc.SetReadDeadline(now.Add(jsonBodyTimeout))
		b.armed = now
	case b.rolling && now.Sub(b.armed) > rearmEvery:
		b.rc.SetReadDeadline(now.Add(streamIdleTimeout))
		b.armed = now
	}
	n, err := b.ReadCloser.Read(p)
	if err != nil {
		b.disarm()
	}
	return n, err
}

func (b *timedBody) Close() error {
	b.disarm()
	return b.ReadCloser.Close()
}

func (b *timedBody) disarm() {
	if !b.armed.IsZero() {
		b.rc.SetReadDeadline(time.Time{})
	}
}

// timeBody puts the deadline on r's body where it has one.
func timeBody(w http.ResponseWriter, r *http.Request, rolling bool) {
	if r.Body != nil && r.Body != http.NoBody {
		r.Body = &timedBody{ReadCloser: r.Body, rc: http.NewResponseController(w), rolling: rolling}
	}
}

// lingerFor is how long a client that was refused may go on sending.
const lingerFor = 2 * time.Second

// refuse answers with err a request whose body may not have been read to its
// end. net/http closes the connection of such a request, at once where it was
// sent with "Expect: 100-continue": a client that is still sending would see a
// broken pipe in place of the answer. So the answer goes out whole, and what
// still comes is read and dropped, for a while.
func (a *API) refuse(w http.ResponseWriter, r *http.Request, body io.Reader, err error) {
	if r.ProtoMajor != 1 || body == nil || body == http.NoBody {
		a.fail(w, r, err)
		return
	}
	e := a.toError(r.Context(), err)
	data, jerr := json.Marshal(e.body)
	if jerr != nil {
		a.fail(w, r, err)
		return
	}
	rc := http.NewResponseController(w)
	rc.EnableFullDuplex()
	h := w.Header()
	h.Set("Connection", "close")
	h.Set("Content-Length", strconv.Itoa(len(data)+1)) // else its end would only come with the linger's
	writeJSONHead(w, e.status)
	w.Write(append(data, '\n'))
	rc.Flush()
	linger(w, r, body)
}

// linger reads and drops what still comes of body behind an answer that was
// written and flushed.
func linger(w http.ResponseWriter, r *http.Request, body io.Reader) {
	if r.ProtoMajor != 1 || body == nil || body == http.NoBody {
		return // HTTP/2 ends the one stream alone
	}
	http.NewResponseController(w).SetReadDeadline(time.Now().Add(lingerFor))
	io.Copy(io.Discard, body)
}

// copyBuffer is the size of the buffers that files are copied through: large
// enough that net/http's own buffers are passed by.
const copyBuffer = 256 << 10

var copyBuffers = sync.Pool{New: func() any { b := make([]byte, copyBuffer); return &b }}

// copyStream copies src to dst by a large borrowed buffer. flush, where set,
// is called after every write. A failed write is errWrite's: nobody is left
// to tell.
func copyStream(dst io.Writer, src io.Reader, flush func() error) (int64, error) {
	buf := copyBuffers.Get().(*[]byte)
	defer copyBuffers.Put(buf)
	var total int64
	for {
		n, rerr := src.Read(*buf)
		if n > 0 {
			if _, err := dst.Write((*buf)[:n]); err != nil {
				return total, errors.Join(errWrite, err)
			}
			total += int64(n)
			if flush != nil {
				if err := flush(); err != nil {
					return total, errors.Join(errWrite, err)
				}
			}
		}
		if rerr == io.EOF {
			return total, nil
		}
		if rerr != nil {
			return total, rerr
		}
	}
}

var errWrite = errors.New("the reader went away")
