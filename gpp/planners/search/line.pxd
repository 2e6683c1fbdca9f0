cimport cython

cdef double NEVER

@cython.locals(width=cython.Py_ssize_t, best_s="double[::1]", chosen="long long[::1]", stages="long long[::1]", least="long long[::1]", i=cython.Py_ssize_t, d=cython.Py_ssize_t, row=cython.Py_ssize_t, at=cython.Py_ssize_t, behind=cython.Py_ssize_t, first=cython.Py_ssize_t, busy=cython.double, through=cython.double, took=cython.double, most=cython.longlong, rows=list)
cpdef tuple best_chain(long long[::1] begin, long long[::1] end, long long[::1] replicas, double[::1] busy_s, double[::1] through_s, long long[::1] depth, Py_ssize_t last, Py_ssize_t num_devices)
