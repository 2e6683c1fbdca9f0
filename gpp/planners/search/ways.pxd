cimport cython

@cython.final
cdef class MessageRoute:
    cdef double share
    cdef Py_ssize_t num_links
    cdef double[::1] late, slow

@cython.final
cdef class DeviceGroup:
    cdef object devices
    cdef dict routes

@cython.final
cdef class KnownPart:
    cdef object mask, count
    cdef tuple ops
    cdef double least_s
    cdef dict needs, on, sent

@cython.final
cdef class StageWays:
    cdef object asked
    cdef dict known_groups, known, states, numbers
    cdef list given, pieces, groups
    cdef readonly Py_ssize_t deepest
    cdef Py_ssize_t n, size, filled
    cdef long long b, count, minibatches
    cdef bint drains, parts
    cdef long long[::1] first_read, read, owner, mark, ranked, place_of, degree, depth, state_at, held_at
    cdef long long[::1] first_next, came_from, src, dst, next
    cdef double[::1] ahead, back, forward, backward, late, update, trip, around, way, bounds
    cpdef void take(self, parts) except *
    @cython.locals(found=KnownPart)
    cdef KnownPart _piece(self, part)
    @cython.locals(most=cython.double, p=cython.Py_ssize_t, piece=KnownPart)
    cpdef double least_s(self) except? -1
    @cython.locals(size=cython.Py_ssize_t, edges=cython.Py_ssize_t, p=cython.Py_ssize_t, s=cython.Py_ssize_t, k=cython.Py_ssize_t)
    cpdef list arrange(self, bint chain)
    @cython.locals(count=cython.Py_ssize_t, op=cython.Py_ssize_t, p=cython.Py_ssize_t, q=cython.Py_ssize_t, k=cython.Py_ssize_t, piece=KnownPart)
    cdef Py_ssize_t _edges(self, bint chain) except -1
    @cython.locals(size=cython.Py_ssize_t, p=cython.Py_ssize_t, s=cython.Py_ssize_t, k=cython.Py_ssize_t, op=cython.Py_ssize_t, count=cython.Py_ssize_t, first=cython.Py_ssize_t, at=cython.Py_ssize_t, piece=KnownPart)
    cdef bint _sort(self, Py_ssize_t edges) except *
    @cython.locals(size=cython.Py_ssize_t, s=cython.Py_ssize_t, t=cython.Py_ssize_t, q=cython.Py_ssize_t, k=cython.Py_ssize_t, at=cython.Py_ssize_t)
    cdef void _list_next(self, Py_ssize_t edges) noexcept
    @cython.locals(d=cython.Py_ssize_t)
    cdef void _fill_states(self) except *
    @cython.locals(s=cython.Py_ssize_t, piece=KnownPart, need=object, state=cython.longlong)
    cpdef bint fits(self, double limit_bytes) except *
    cpdef void place(self, placement) except *
    @cython.locals(found=DeviceGroup)
    cdef DeviceGroup _group(self, devices)
    @cython.locals(most=cython.double)
    cpdef double bound(self, bint shared, double below_s) except? -1
    @cython.locals(s=cython.Py_ssize_t, k=cython.Py_ssize_t, longest=cython.double, around=cython.double, held=cython.longlong)
    cdef double _round_trips(self, bint shared, double below_s) except? -1
    @cython.locals(s=cython.Py_ssize_t, k=cython.Py_ssize_t, most=cython.double, busy=cython.double, found=cython.double, begun=cython.double, around=cython.double)
    cdef double _ways(self, double below_s) noexcept
    @cython.locals(piece=KnownPart, group=DeviceGroup)
    cdef void _times(self, Py_ssize_t s) except *
    @cython.locals(piece=KnownPart, group=DeviceGroup, reader=KnownPart, to=DeviceGroup, route=MessageRoute, k=cython.Py_ssize_t, j=cython.Py_ssize_t, forward=cython.double, backward=cython.double, samples=cython.double)
    cdef void _messages(self, Py_ssize_t s, bint shared) except *
