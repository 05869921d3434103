package wire

import "time"

// Pool is a pool of sandboxes that are ready to be claimed.
type Pool struct {
	ID         string     `json:"id" doc:"Names the pool; it follows from its template, runtime and resources" example:"pol7k2m9q4x1v8n3p6tc"`
	Template   string     `json:"template" doc:"By name: what it means changes with the template" example:"base"`
	TemplateID string     `json:"template_id,omitempty" doc:"The content that members are made of now; absent while there is none"`
	Runtime    string     `json:"runtime" example:"gvisor"`
	Resources  Resources  `json:"resources" doc:"The limits of its members: a create has to come to the same to get one"`
	Ready      int        `json:"ready" doc:"Sandboxes to keep ready"`
	Available  int        `json:"available" doc:"Sandboxes that are ready now"`
	Making     int        `json:"making" doc:"Sandboxes that are being made"`
	Ending     int        `json:"ending" doc:"Sandboxes that are being ended: the pool shrinks, or its template changed"`
	Members    []string   `json:"members,omitempty" doc:"ids of those that are ready. They answer to nobody until they are claimed"`
	Capture    *Warm      `json:"capture,omitempty" doc:"What members are restored from, where the runtime can; absent: they boot"`
	Error      *Error     `json:"error,omitempty" doc:"Why the last member could not be made; it is tried again. Absent: it could"`
	ErrorAt    *time.Time `json:"error_at,omitempty"`
	CreatedAt  time.Time  `json:"created_at"`
}

// Warm is the capture of a sandbox of a template whose agent and start command
// are up.
type Warm struct {
	ID        string    `json:"id"`
	SizeBytes int64     `json:"size_bytes"`
	CreatedAt time.Time `json:"created_at"`
}

// SetPool says what a pool is to be.
type SetPool struct {
	Template  string          `json:"template,omitempty" maxLength:"256" doc:"Name; default: base"`
	Runtime   string          `json:"runtime,omitempty" maxLength:"64" doc:"Default: gvisor where it can run, else container"`
	Resources ResourceRequest `json:"resources,omitzero"`
	Ready     int             `json:"ready" minimum:"0" maximum:"1000" doc:"Sandboxes to keep ready; 0 ends those that there are and keeps the pool on record"`
}

// PoolList is all pools, the oldest first.
type PoolList struct {
	Pools []Pool `json:"pools"`
}
