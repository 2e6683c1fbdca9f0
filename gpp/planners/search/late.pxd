cimport cython

cdef double SAME
cdef double INF

@cython.final
cdef class LateSteps:
    cdef Py_ssize_t num_devices, count, num_units, num_sources, watched
    cdef bint no_time
    cdef double below
    cdef long long[::1] sizes, unit_stage, unit_device, first_in, in_pair, pair_src, pair_back, sum_set, at_once
    cdef double[::1] over, pass_s, update_s, pair_ahead_s, pair_late, pair_back_s, sum_s
    cdef double[::1] load, ends, left, opens, tail, way
    @cython.locals(f=cython.Py_ssize_t)
    cdef void prepare(self) noexcept
    @cython.locals(d=cython.Py_ssize_t)
    cdef void watch(self, double below_s) noexcept
    @cython.locals(until=cython.double)
    cdef inline bint late(self, Py_ssize_t d, double now, double took) noexcept
    @cython.locals(d=cython.Py_ssize_t, u=cython.Py_ssize_t, k=cython.Py_ssize_t, p=cython.Py_ssize_t, v=cython.Py_ssize_t, now=cython.double, took=cython.double, late=cython.bint)
    cdef bint surely(self) noexcept
    @cython.locals(d=cython.Py_ssize_t, u=cython.Py_ssize_t, i=cython.Py_ssize_t, s=cython.Py_ssize_t)
    cdef void _add_up(self) noexcept
    @cython.locals(row=cython.Py_ssize_t, d=cython.Py_ssize_t, u=cython.Py_ssize_t, k=cython.Py_ssize_t, p=cython.Py_ssize_t, v=cython.Py_ssize_t, way=cython.double, took=cython.double)
    cdef void _find_tails(self, Py_ssize_t f) noexcept
