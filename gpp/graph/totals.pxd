cimport cython

@cython.final
cdef class SetTotals:
    cdef Py_ssize_t n, num_shared
    cdef bint any_transient
    cdef long long ask
    cdef double[::1] totals, saved, late, again, own, fixed, after, size, back, unsaved, withheld, trainable, frozen, row_bytes
    cdef double[::1] slope, narrow, shared_bytes, waiting
    cdef double steepest, highest
    cdef long long[::1] producer, first_made, made, first_read, read, first_reader, reader, first_param, param, first_row, row
    cdef long long[::1] inside, ops, seen, seen_param, seen_row, first_shared, sharing
    @cython.locals(out=cython.double[::1], count=cython.Py_ssize_t, op=cython.Py_ssize_t, i=cython.Py_ssize_t, k=cython.Py_ssize_t, p=cython.Py_ssize_t, t=cython.Py_ssize_t, trainable=cython.double, frozen=cython.double, rows=cython.double, saved=cython.double, late=cython.double, narrow=cython.double, largest=cython.double, again=cython.double, incoming=cython.double, incoming_back=cython.double, outgoing=cython.double, outgoing_back=cython.double, unsaved=cython.double, slope=cython.double, fixed=cython.double)
    cpdef void add_up(self, bytes packed) except *
    @cython.locals(k=cython.Py_ssize_t, outside=cython.longlong)
    cdef bint _leaves(self, Py_ssize_t t) noexcept
    @cython.locals(i=cython.Py_ssize_t, k=cython.Py_ssize_t, op=cython.Py_ssize_t)
    cdef void _find_lines(self, Py_ssize_t count) noexcept
    @cython.locals(left=cython.longlong, met=cython.longlong, k=cython.Py_ssize_t, reader=cython.Py_ssize_t, op=cython.Py_ssize_t)
    cdef void _wait(self, Py_ssize_t i) noexcept
