cimport cython

cdef double INF
cdef unsigned long long ALL
cdef unsigned long long FIRST
cdef unsigned long long SECOND
cdef long long BASE
cdef long long ONE
cdef long long ROWS

@cython.final
cdef class KnownSteps:
    cdef long long[::1] held, sizes, order, distance, first_unit, unit_device, pair_src, pair_dst, pair_back, sum_set
    cdef long long[::1] pass_s, update_s, sum_s, pair_late, pair_ahead_s, pair_back_s, label, passes
    cdef unsigned long long[::1] ones, twos
    cdef double[::1] took, reach
    cdef unsigned long long one, two
    cdef Py_ssize_t num_devices, row
    @cython.locals(i=cython.Py_ssize_t)
    cdef bint find(self, Py_ssize_t num_stages) noexcept
    @cython.locals(i=cython.Py_ssize_t)
    cdef double step_s(self, double below_s) noexcept
    @cython.locals(i=cython.Py_ssize_t)
    cdef void keep(self, long long passes, double took, double reach) noexcept
    @cython.locals(i=cython.Py_ssize_t, u=cython.Py_ssize_t, d=cython.Py_ssize_t, p=cython.Py_ssize_t, s=cython.Py_ssize_t, at=cython.longlong, labels=cython.longlong, own=cython.longlong)
    cdef void _digest(self, Py_ssize_t num_stages) noexcept
    cdef inline void _mix(self, long long value) noexcept
