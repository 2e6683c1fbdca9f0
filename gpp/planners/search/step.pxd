cimport cython

from gpp.planners.search.known cimport KnownSteps
from gpp.planners.search.late cimport LateSteps
from gpp.planners.search.shape cimport StageShapes

cdef long long MOST
cdef double SAME
cdef double ROUNDING
cdef double INF
cdef long long AT_LEAST

@cython.final
cdef class StepTimer:
    cdef long long[::1] work, sizes, waker, unit_stage, held, distance, order, first_out
    cdef long long[::1] pair_back, over_by, first_in, head, running, awake, depth, ahead, unit_device
    cdef long long[::1] of_device, next_unit, ready, missing, listed, urgency, behind, first
    cdef long long[::1] sequence, sequence_mb, pair_dst, in_pair, pair_src, sum_set, last, first_unit
    cdef StageShapes shape
    cdef KnownSteps known
    cdef LateSteps late
    cdef double reach
    cdef Py_ssize_t num_stages, num_units, num_pairs, num_sums, num_pushed, num_popped, line, count, num_devices, most
    cdef Py_ssize_t num_nodes, num_listed
    cdef double[::1] wakes_s, pass_s, free, start, began, middle, arrived, pair_ahead_s, pair_late
    cdef double[::1] pair_back_s, sum_s, update_s, over
    cpdef double step_s(self, Py_ssize_t num_stages, double below_s, bint chain=*) except? -1
    cdef bint prepare(self, Py_ssize_t num_stages, double below_s, bint chain) except -1
    @cython.locals(took=cython.double)
    cdef double timed_s(self, double below_s) except? -1
    @cython.locals(total=cython.longlong, i=cython.Py_ssize_t, ways=cython.longlong)
    cdef long long passes(self) noexcept
    @cython.locals(at=cython.Py_ssize_t)
    cdef void _push(self, double when, long long device) noexcept
    @cython.locals(m=cython.longlong, ahead=cython.longlong)
    cdef long long _node_at(self, Py_ssize_t u, long long at) noexcept
    @cython.locals(u=cython.Py_ssize_t, d=cython.Py_ssize_t, at=cython.Py_ssize_t, node=cython.longlong, what=cython.longlong, way=cython.longlong, total=cython.Py_ssize_t, now=cython.double, took=cython.double, done=cython.Py_ssize_t)
    cdef bint _order(self, double below_s) noexcept
    @cython.locals(i=cython.Py_ssize_t, u=cython.Py_ssize_t, d=cython.Py_ssize_t, m=cython.longlong, total=cython.Py_ssize_t, s=cython.Py_ssize_t)
    cdef Py_ssize_t _begin(self) noexcept
    @cython.locals(k=cython.Py_ssize_t, b=cython.longlong, what=cython.longlong, missing=cython.longlong)
    cdef void _ask(self, Py_ssize_t u) noexcept
    @cython.locals(d=cython.Py_ssize_t, urgency=cython.longlong, at=cython.longlong, before=cython.longlong)
    cdef void _line_up(self, Py_ssize_t u) noexcept
    cdef void _wake(self, Py_ssize_t d) noexcept
    @cython.locals(u=cython.Py_ssize_t, k=cython.Py_ssize_t, p=cython.Py_ssize_t, way=cython.longlong, waited=cython.longlong)
    cdef void _ended(self, long long what) noexcept
    cdef void _one_less(self, Py_ssize_t u, long long what) noexcept
    @cython.locals(i=cython.Py_ssize_t, turn=cython.Py_ssize_t, resources=cython.Py_ssize_t, low=cython.double, high=cython.double, end=cython.double, before=cython.double, earlier=cython.double, most=cython.double, grew=cython.double)
    cdef double _walk(self, double below_s) noexcept
    @cython.locals(m=cython.longlong, c=cython.Py_ssize_t, at=cython.Py_ssize_t, node=cython.longlong, u=cython.Py_ssize_t, way=cython.Py_ssize_t, k=cython.Py_ssize_t, p=cython.Py_ssize_t, d=cython.Py_ssize_t, b=cython.Py_ssize_t, now=cython.double, when=cython.double, took=cython.double)
    cdef bint _step(self) noexcept
    cdef double _sent(self, Py_ssize_t channel, double now, double took) noexcept
    @cython.locals(i=cython.Py_ssize_t, u=cython.Py_ssize_t, s=cython.Py_ssize_t, d=cython.Py_ssize_t, now=cython.double, took=cython.double)
    cdef void _finish(self) noexcept
