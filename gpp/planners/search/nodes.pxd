cimport cython

@cython.final
cdef class NodeRoom:
    cdef tuple nodes
    cdef Py_ssize_t num_nodes, size
    cdef long long[::1] free, having
    @cython.locals(free=cython.Py_ssize_t, node=cython.Py_ssize_t, before=cython.Py_ssize_t, s=cython.Py_ssize_t, count=cython.Py_ssize_t, out=list, chosen=tuple)
    cpdef tuple deal(self, counts)
    @cython.locals(free=cython.Py_ssize_t, first=cython.Py_ssize_t, devices=tuple)
    cdef tuple _take(self, Py_ssize_t node, Py_ssize_t count)
    @cython.locals(free=cython.Py_ssize_t)
    cdef Py_ssize_t _fullest_with(self, Py_ssize_t count) noexcept
    @cython.locals(free=cython.Py_ssize_t)
    cdef Py_ssize_t _roomiest(self) noexcept
    @cython.locals(node=cython.Py_ssize_t)
    cdef Py_ssize_t _first(self, Py_ssize_t free) noexcept
