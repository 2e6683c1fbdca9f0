cimport cython

cdef long long ORDER_ONLY

@cython.final
cdef class StageEdges:
    cdef public long long[::1] edge, back_edge, place, dst, first_from, next_from
    cdef public double[::1] ahead, back
    cdef long long[::1] backs, of, sets, order, distance, producer, first_reader, reader
    cdef long long[::1] noted, src, next_to, reaches, first_to, mark, ranked, degree, group
    cdef double[::1] ahead_bytes, back_bytes
    cdef Py_ssize_t wide, num_stages, num_edges, n, num_tensors
    cdef bint one_way
    @cython.locals(size=cython.Py_ssize_t, s=cython.Py_ssize_t, t=cython.Py_ssize_t, i=cython.Py_ssize_t, k=cython.Py_ssize_t, at=cython.Py_ssize_t)
    cdef bint arrange(self, Py_ssize_t num_stages, bint chain) noexcept
    @cython.locals(at=cython.Py_ssize_t)
    cdef void _note(self, Py_ssize_t s, Py_ssize_t t) noexcept
    @cython.locals(s=cython.Py_ssize_t, t=cython.Py_ssize_t, k=cython.Py_ssize_t)
    cdef void _list_by_reader(self) noexcept
    @cython.locals(s=cython.Py_ssize_t, j=cython.Py_ssize_t, k=cython.Py_ssize_t)
    cdef void list_by_sender(self) noexcept
    @cython.locals(size=cython.Py_ssize_t, s=cython.Py_ssize_t, i=cython.Py_ssize_t, k=cython.Py_ssize_t, at=cython.Py_ssize_t, count=cython.Py_ssize_t, first=cython.Py_ssize_t)
    cdef bint _sort(self) noexcept
    @cython.locals(s=cython.Py_ssize_t, t=cython.Py_ssize_t, c=cython.Py_ssize_t, i=cython.Py_ssize_t, j=cython.Py_ssize_t, k=cython.Py_ssize_t, count=cython.Py_ssize_t)
    cdef void hand_on(self) noexcept
    @cython.locals(further=cython.longlong)
    cdef bint _farther(self, Py_ssize_t s, Py_ssize_t t) noexcept
    @cython.locals(size=cython.Py_ssize_t, wide=cython.Py_ssize_t, s=cython.Py_ssize_t, t=cython.Py_ssize_t, i=cython.Py_ssize_t, j=cython.Py_ssize_t, k=cython.Py_ssize_t)
    cdef void _reach(self) noexcept
    cdef void _move(self, Py_ssize_t tensor, Py_ssize_t old, Py_ssize_t new) noexcept
