package files

import (
	"compress/gzip"
	"io"
	"mime"
	"net/http"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/warrenhq/warren/internal/agent/control"
)

// Download serves GET and HEAD /files?path=&username=: the file's bytes with
// Content-Length, ranges, and gzip where the client asks for it.
func (h *Handler) Download(w http.ResponseWriter, r *http.Request) {
	if err := h.Session.CheckFile(r, control.OperationRead); err != nil {
		WriteStatus(w, http.StatusUnauthorized, err.Error())
		return
	}
	if err := h.download(w, r); err != nil {
		WriteError(w, err)
	}
}

func (h *Handler) download(w http.ResponseWriter, r *http.Request) error {
	u, err := h.user(r.URL.Query().Get("username"))
	if err != nil {
		return err
	}
	path, err := resolve(r.URL.Query().Get("path"), u)
	if err != nil {
		return err
	}
	coding, ok := encoding(r.Header.Values("Accept-Encoding"))
	if !ok {
		return statusf(http.StatusNotAcceptable, "none of the encodings %q can be sent: this server has identity and gzip", strings.Join(r.Header.Values("Accept-Encoding"), ", "))
	}
	f, st, err := openRegular(path)
	if err != nil {
		return err
	}
	defer f.Close()

	// The first bytes tell the type, without the table of types that Go would
	// read from the sandbox's disk and keep.
	head := make([]byte, 512)
	n, err := io.ReadFull(f, head)
	if err != nil && err != io.EOF && err != io.ErrUnexpectedEOF {
		return err
	}
	hd := w.Header()
	hd.Set("Content-Type", http.DetectContentType(head[:n]))
	hd.Set("X-Content-Type-Options", "nosniff")
	if d := mime.FormatMediaType("inline", map[string]string{"filename": strings.ToValidUTF8(filepath.Base(path), "?")}); d != "" {
		hd.Set("Content-Disposition", d)
	}
	hd.Set("Vary", "Accept-Encoding")
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return err
	}
	switch {
	case coding == "gzip" && r.Header.Get("Range") == "":
		hd.Set("Content-Encoding", "gzip")
		if r.Method == http.MethodHead {
			return nil
		}
		zw, _ := gzip.NewWriterLevel(w, gzip.BestSpeed)
		stream(zw, f)
		zw.Close()
	case st.Size() == 0 && n > 0:
		// A file of /proc or the like, whose size only reading tells.
		if r.Method != http.MethodHead {
			stream(w, f)
		}
	case st.Size() == 0:
		hd.Set("Content-Length", "0")
	default:
		http.ServeContent(w, r, "", st.ModTime(), f)
	}
	return nil
}

// stream copies src to an answer under way. If reading fails the connection is
// broken off, so that the client does not take a part for the whole.
func stream(dst io.Writer, src io.Reader) {
	buf := buffers.Get().(*[]byte)
	defer buffers.Put(buf)
	if _, err := io.CopyBuffer(struct{ io.Writer }{dst}, struct{ io.Reader }{src}, *buf); err != nil {
		panic(http.ErrAbortHandler)
	}
}

// encoding chooses gzip or identity by Accept-Encoding (RFC 9110, 12.5.3);
// gzip where it is named and not worth less than identity. ok is false where
// the client takes neither.
func encoding(accept []string) (coding string, ok bool) {
	if len(accept) == 0 {
		return "identity", true
	}
	q := map[string]float64{}
	for _, part := range strings.Split(strings.Join(accept, ","), ",") {
		name, params, _ := strings.Cut(part, ";")
		name = strings.ToLower(strings.TrimSpace(name))
		if name == "" {
			continue
		}
		weight := 1.0
		if v, found := strings.CutPrefix(strings.ToLower(strings.ReplaceAll(params, " ", "")), "q="); found {
			f, err := strconv.ParseFloat(v, 64)
			if err != nil || !(f >= 0 && f <= 1) {
				continue
			}
			weight = f
		}
		q[name] = weight
	}
	star, hasStar := q["*"]
	identity, named := q["identity"]
	if !named {
		identity = 0.001 // always acceptable, unless refused, but the last choice
		if hasStar {
			identity = star
		}
	}
	zip, named := q["gzip"]
	if !named {
		if zip, named = q["x-gzip"]; !named && hasStar && identity == 0 {
			zip, named = star, true
		}
	}
	switch {
	case named && zip > 0 && zip >= identity:
		return "gzip", true
	case identity > 0:
		return "identity", true
	}
	return "", false
}
