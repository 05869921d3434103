need python3 gcc
python3 -c 'import setuptools' 2>/dev/null || skip "python3's setuptools is not in the template"
[ -e "$(python3 -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" ] || skip "Python.h is not in the template"
cat >prove.c <<'C'
#include <Python.h>
static PyObject *six(PyObject *s, PyObject *a) { return PyLong_FromLong(6 * 7); }
static PyMethodDef m[] = {{"answer", six, METH_NOARGS, 0}, {0}};
static struct PyModuleDef d = {PyModuleDef_HEAD_INIT, "warrenprove", 0, -1, m};
PyMODINIT_FUNC PyInit_warrenprove(void) { return PyModule_Create(&d); }
C
cat >setup.py <<'P'
from setuptools import Extension, setup
setup(name="warrenprove", version="1", ext_modules=[Extension("warrenprove", ["prove.c"])])
P
if python3 -m pip --version >/dev/null 2>&1 && python3 -c 'import wheel' 2>/dev/null; then
	python3 -m pip wheel --no-index --no-deps --no-build-isolation -w wheels . >log 2>&1 || { tail -n 5 log >&2; exit 1; }
	python3 -m pip install --no-index --no-deps --target lib wheels/*.whl >log 2>&1 || { tail -n 5 log >&2; exit 1; }
	how="a wheel built by pip"
else
	python3 setup.py -q build_ext --build-lib lib >log 2>&1 || { tail -n 5 log >&2; exit 1; }
	how="built by setuptools"
fi
PYTHONPATH=lib python3 -c 'import warrenprove; assert warrenprove.answer() == 42'
echo "$how, imported"
