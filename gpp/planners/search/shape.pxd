cimport cython

from gpp.planners.search.edges cimport StageEdges

cdef double INF
cdef long long ORDER_ONLY
@cython.locals(low=cython.longlong, high=cython.longlong)
cdef long long _overlap(long long i, long long count, long long j, long long others) noexcept
@cython.locals(low=cython.longlong)
cdef bint _before(long long one, long long other) noexcept

@cython.final
cdef class StageShapes:
    cdef Py_ssize_t num_stages, num_types, num_devices, num_params, count, n, most_units, wide
    cdef Py_ssize_t num_units, samples, most_pairs, num_pairs
    cdef long long[::1] replicas, backs, mark, has_type, sets, type_of, first_trained, of
    cdef long long[::1] trained, differentiated, edge, back_edge, place, dst, first_from, next_from, bit_of
    cdef long long[::1] order, first_unit, unit_stage, unit_device, sizes, first_out
    cdef long long[::1] pair_src, pair_dst, pair_back, pair_samples, first_in, head, in_pair, sum_set
    cdef double[::1] trainable, param_bytes, load, update_s, update_fixed, update_each, update_none, forward_s
    cdef double[::1] backward_s, sum_ahead, sum_back, op_forward_s, op_backward_s, fixed, ahead, back
    cdef double[::1] pair_late, pair_ahead_s, pair_back_s, latency, bandwidth, over
    cdef double[::1] updates_s, pass_s, sum_s
    cdef bint parts_updates, shares
    cdef object facts
    cdef StageEdges edges
    cdef double norm_bytes
    cdef dict rings
    @cython.locals(found=cython.longlong, d=cython.Py_ssize_t)
    cpdef long long busiest(self)
    cpdef bint prepare(self, Py_ssize_t num_stages, double below_s, bint chain) except -1
    @cython.locals(s=cython.Py_ssize_t, d=cython.Py_ssize_t, i=cython.Py_ssize_t, k=cython.Py_ssize_t, took=cython.double, size=cython.Py_ssize_t, types=cython.Py_ssize_t, rest=cython.longlong)
    cdef bint _priced(self, double below_s) noexcept
    cdef inline Py_ssize_t _first(self, long long own) noexcept
    @cython.locals(s=cython.Py_ssize_t, t=cython.Py_ssize_t, own=cython.longlong, seen=cython.longlong)
    cdef void _share(self) noexcept
    @cython.locals(s=cython.Py_ssize_t, op=cython.Py_ssize_t, k=cython.Py_ssize_t, row=cython.Py_ssize_t, types=cython.Py_ssize_t)
    cdef void _pass_times(self) noexcept
    @cython.locals(i=cython.Py_ssize_t, j=cython.Py_ssize_t, k=cython.Py_ssize_t, d=cython.Py_ssize_t, s=cython.Py_ssize_t, t=cython.Py_ssize_t, u=cython.Py_ssize_t, v=cython.Py_ssize_t, p=cython.Py_ssize_t, units=cython.Py_ssize_t, low=cython.longlong, high=cython.longlong, many=cython.longlong, size=cython.Py_ssize_t, between=cython.Py_ssize_t, only=cython.double, rest=cython.longlong)
    cdef bint _pairs(self) noexcept
    @cython.locals(p=cython.Py_ssize_t, u=cython.Py_ssize_t)
    cdef void _group_by_reader(self) noexcept
    @cython.locals(i=cython.Py_ssize_t, u=cython.Py_ssize_t, k=cython.Py_ssize_t, p=cython.Py_ssize_t, s=cython.longlong, ahead=cython.double, back=cython.double, own=cython.double, own_back=cython.double, handled=cython.bint)
    cdef void _pass_seconds(self) noexcept
    @cython.locals(src=cython.Py_ssize_t, dst=cython.Py_ssize_t, size=cython.double, tensors=cython.longlong, between=cython.Py_ssize_t, many=cython.longlong, i=cython.Py_ssize_t, j=cython.Py_ssize_t)
    cdef double _handling(self, Py_ssize_t p, bint backward, bint sends) noexcept
    @cython.locals(s=cython.Py_ssize_t, i=cython.Py_ssize_t, k=cython.Py_ssize_t, own=cython.longlong, size=cython.double, count=cython.Py_ssize_t)
    cdef void _find_sums(self) except *
    @cython.locals(out=cython.double, fixed=cython.double, each=cython.double)
    cdef double _ring_s(self, long long own, double size) except -1
