package wire

import (
	"time"

	"github.com/warrenhq/warren/internal/sandbox"
)

// Error is the body of every answer that is not a success.
type Error struct {
	Code    sandbox.Code      `json:"code" doc:"Stable and machine-readable" example:"not_found"`
	Message string            `json:"message" doc:"What was wrong and what to do"`
	Details map[string]string `json:"details,omitempty"`
}

// Err gives e as an error of the domain.
func (e Error) Err() *sandbox.Error {
	return &sandbox.Error{Code: e.Code, Message: e.Message, Details: e.Details}
}

// Runtime tells whether the host can run one runtime.
type Runtime struct {
	Name         string               `json:"name"`
	Default      bool                 `json:"default,omitempty" doc:"Chosen where a create names none"`
	Available    bool                 `json:"available" doc:"This host can run it"`
	Capabilities sandbox.Capabilities `json:"capabilities"`
	Error        *Error               `json:"error,omitempty" doc:"Why it cannot run here, with the remedy"`
}

// RuntimeList is all runtimes that this build knows of.
type RuntimeList struct {
	Runtimes []Runtime `json:"runtimes"`
}

// Capacity is the host's budget and how much of it is in use.
type Capacity struct {
	Sandboxes int            `json:"sandboxes" doc:"Live ones"`
	ByState   map[string]int `json:"by_state"`
	ByRuntime map[string]int `json:"by_runtime"`

	Spares map[string]int `json:"spares" doc:"Sandboxes that are prepared and wait for a fork or a wake: their network slots, by the id that the host has them under"`

	Departing int `json:"departing" doc:"Hibernated sandboxes that are leaving the host: what they had of it counts as used until they have"`

	MemoryTotal     int64 `json:"memory_total_bytes"`
	MemoryAvailable int64 `json:"memory_available_bytes" doc:"What the host can still give without swapping"`
	MemoryReserve   int64 `json:"memory_reserve_bytes" doc:"Kept for the host itself"`
	MemoryBudget    int64 `json:"memory_budget_bytes" doc:"What live sandboxes may be promised together"`
	MemoryPromised  int64 `json:"memory_promised_bytes"`

	DiskTotal   int64 `json:"disk_total_bytes"`
	DiskFree    int64 `json:"disk_free_bytes"`
	DiskReserve int64 `json:"disk_reserve_bytes" doc:"Below this much free, no sandbox is made"`

	ProcessBudget   int `json:"process_budget"`
	ProcessPromised int `json:"process_promised"`

	Slots     int `json:"slots" doc:"Network slots"`
	SlotsUsed int `json:"slots_used"`

	CreatesInFlight int `json:"creates_in_flight"`
	CreatesMax      int `json:"creates_max"`
}

// TLS is how clients reach sandboxes and the API by TLS.
type TLS struct {
	Domain string `json:"domain" doc:"Sandboxes' ports are at https://<port>-<id>.DOMAIN, the API at https://api.DOMAIN; with the port, unless it is 443" example:"box.example.com:8443"`
	CA     string `json:"ca,omitempty" doc:"PEM certificate of the daemon's own authority, which clients have to trust; absent where the daemon has a certificate that it was given"`
}

// Version is what the daemon calls itself.
type Version struct {
	Version string `json:"version"`
	API     string `json:"api" example:"v1"`
	Go      string `json:"go"`
	OS      string `json:"os"`
	Arch    string `json:"arch"`
}

// CreateKey asks for a new API key.
type CreateKey struct {
	Name string `json:"name,omitempty" maxLength:"100" doc:"To tell keys apart"`
}

// Key is an API key's record.
type Key struct {
	ID         string     `json:"id"`
	Name       string     `json:"name,omitempty"`
	Tenant     string     `json:"tenant"`
	Prefix     string     `json:"prefix" doc:"The key's first characters"`
	Key        string     `json:"key,omitempty" doc:"The key itself, told once: when it is made"`
	CreatedAt  time.Time  `json:"created_at"`
	LastUsedAt *time.Time `json:"last_used_at,omitempty"`
}

// KeyList is the tenant's keys.
type KeyList struct {
	Keys []Key `json:"keys"`
}
