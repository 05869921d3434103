package prove

import "context"

// captures tells which captures work and what they preserve.
func (m *measurement) captures(ctx context.Context) ([]Row, error) {
	return nil, nil
}
