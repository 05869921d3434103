package api

import (
	"log/slog"
	"net/http"
	"time"
)

// Bounds of what a connection may ask for before it has shown anything.
const (
	readHeaderTimeout = 10 * time.Second
	idleTimeout       = 2 * time.Minute
	maxHeaderBytes    = 64 << 10
	h2Streams         = 1000
	h2StreamWindow    = 4 << 20
	h2ConnWindow      = 16 << 20
)

// NewServer makes an HTTP server for one of the API's handlers: HTTP/1.1 and
// HTTP/2, also without TLS, with limits on headers and on how slowly they may come.
// There is no limit on how long an answer may take: streams are the rule; how
// slowly a body may come is limited where it is read.
func NewServer(h http.Handler, log *slog.Logger) *http.Server {
	s := &http.Server{
		Handler:           h,
		ReadHeaderTimeout: readHeaderTimeout,
		IdleTimeout:       idleTimeout,
		MaxHeaderBytes:    maxHeaderBytes,
		ConnContext:       connContext,
		Protocols:         new(http.Protocols),
		HTTP2: &http.HTTP2Config{
			MaxConcurrentStreams:          h2Streams,
			MaxReceiveBufferPerStream:     h2StreamWindow,
			MaxReceiveBufferPerConnection: h2ConnWindow,
		},
	}
	s.Protocols.SetHTTP1(true)
	s.Protocols.SetHTTP2(true)
	s.Protocols.SetUnencryptedHTTP2(true)
	if log != nil {
		s.ErrorLog = slog.NewLogLogger(log.Handler(), slog.LevelDebug)
	}
	return s
}
