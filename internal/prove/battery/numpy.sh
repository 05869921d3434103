need python3
python3 -c 'import numpy' 2>/dev/null || skip "numpy is not in the template"
python3 - <<'P'
import numpy as np
a = np.arange(250000, dtype=float).reshape(500, 500) / 1e5 + np.eye(500)
x = np.linalg.solve(a, np.ones(500))
assert np.allclose(a @ x, 1)
print("numpy", np.__version__, "solves 500 equations")
P
