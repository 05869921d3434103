package wire

import "time"

// Volume is a directory that outlives sandboxes.
type Volume struct {
	ID        string    `json:"id"`
	Name      string    `json:"name"`
	CreatedAt time.Time `json:"created_at"`
}

// CreateVolume asks for an empty volume.
type CreateVolume struct {
	Name string `json:"name" maxLength:"128" doc:"Letters, digits, _ and -; unique in the tenant"`
}

// VolumeList is all of a tenant's volumes, by name.
type VolumeList struct {
	Volumes []Volume `json:"volumes"`
}
