cimport cython

from gpp.cost.together cimport Together

cdef long long BITS
cdef long long LOW
cdef long long WORD
cdef long long FACTOR
cdef double ROUNDING

cdef class MissingMemory:
    cdef object facts
    cdef dict states
    cdef Together added
    cdef Py_ssize_t n, num_devices, most, words, used, size, wide
    cdef long long[::1] of, sets, distance, ops, state_of, keys, bit_of
    cdef double[::1] memory, needs, passing
    @cython.locals(s=cython.Py_ssize_t, w=cython.Py_ssize_t, d=cython.Py_ssize_t, op=cython.Py_ssize_t, row=cython.Py_ssize_t, words=cython.Py_ssize_t, deepest=cython.longlong, one=cython.longlong, own=cython.longlong, most=cython.double, out=cython.double)
    cpdef double excess(self, Py_ssize_t num_stages) except? -1
    @cython.locals(count=cython.longlong, own=cython.longlong, at=cython.Py_ssize_t, head=cython.longlong, row=cython.Py_ssize_t, w=cython.Py_ssize_t)
    cdef Py_ssize_t _row(self, Py_ssize_t s, long long deepest) except -1
    @cython.locals(at=cython.Py_ssize_t, first=cython.Py_ssize_t, w=cython.Py_ssize_t, same=cython.bint)
    cdef Py_ssize_t _find(self, long long head, Py_ssize_t s) noexcept
    @cython.locals(out=cython.longlong, w=cython.Py_ssize_t)
    cdef Py_ssize_t _hashed(self, long long head, long long[::1] ops, Py_ssize_t first) noexcept
    @cython.locals(size=cython.Py_ssize_t, keys="long long[::1]", needs="double[::1]", passing="double[::1]", row=cython.Py_ssize_t, at=cython.Py_ssize_t, w=cython.Py_ssize_t)
    cdef void _grow(self) except *
    @cython.locals(w=cython.Py_ssize_t, mask=object)
    cdef void _ask(self, Py_ssize_t row, Py_ssize_t s, long long count, long long deepest) except *
    cdef long long _state(self, long long distance, long long deepest) except -1
