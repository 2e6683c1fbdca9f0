cimport cython

cdef class Walk:
    cdef Py_ssize_t num_groups, num_slots, num_nodes
    cdef long long[::1] low, high, first, resource, node, first_need, need
    cdef double[::1] seconds, late
    @cython.locals(i=cython.Py_ssize_t, k=cython.Py_ssize_t, g=cython.Py_ssize_t)
    cdef void _pack(self, groups) except *
    cdef long long _read(self, long long slot) except -1
    cdef long long _begun(self, long long node) except -1
    @cython.locals(g=cython.Py_ssize_t)
    cpdef go(self, double[::1] at, double[::1] begin, long long m=*)
    @cython.locals(i=cython.Py_ssize_t, k=cython.Py_ssize_t, j=cython.Py_ssize_t, until=cython.Py_ssize_t, members=cython.Py_ssize_t, d=cython.Py_ssize_t, node=cython.Py_ssize_t, now=cython.double, when=cython.double)
    cdef void _steps(self, Py_ssize_t g, double[::1] at, double[::1] begin) noexcept
    @cython.locals(i=cython.Py_ssize_t, k=cython.Py_ssize_t, j=cython.Py_ssize_t, r=cython.Py_ssize_t, members=cython.Py_ssize_t, d=cython.longlong)
    cpdef openings(self, long long first, Py_ssize_t count)

@cython.locals(i=cython.Py_ssize_t, same=cython.bint)
cpdef bint grown(double[::1] at, double[::1] before, double grew, double hair)
