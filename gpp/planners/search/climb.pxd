cimport cython

from gpp.planners.search.memory cimport MissingMemory
from gpp.planners.search.step cimport StepTimer

cdef double INF
cdef double STRICT
cdef unsigned long long FACTOR
cdef unsigned long long STATES
cdef long long ONE
cdef long long KEPT
cdef long long MANY

@cython.final
cdef class Climber:
    cdef StepTimer timer
    cdef MissingMemory missing
    cdef long long[::1] work, of, sets, old_of, old_sets, allowed, first_next, next
    cdef long long[::1] first_prior, prior, taken, stack
    cdef long long hot, size, n, num_devices, most, old_size
    cdef bint scarce, apart, deals
    cdef double over
    cdef unsigned long long state
    cdef list kept
    @cython.locals(now=cython.double, took=cython.double, best=cython.double, limit=cython.double, left=cython.double, over=cython.double, strict=cython.double, first=cython.longlong, i=cython.Py_ssize_t, idle=cython.longlong)
    cpdef list walk(self, plan, long long seed, double threshold, long long passes, bint apart=*, bint deals=*)
    cdef double _step_s(self, double below_s, double strict) except? -1
    @cython.locals(i=cython.Py_ssize_t)
    cdef void _keep(self, double took) except *
    @cython.locals(i=cython.Py_ssize_t)
    cdef void _save(self) noexcept
    @cython.locals(i=cython.Py_ssize_t)
    cdef void _back(self) noexcept
    cdef long long _draw(self, long long count) noexcept
    cdef double _share(self) noexcept
    @cython.locals(op=cython.longlong, _=cython.longlong)
    cdef long long _an_operator(self) noexcept
    @cython.locals(what=cython.longlong)
    cdef bint _moved(self) noexcept
    @cython.locals(op=cython.longlong, s=cython.longlong, t=cython.longlong, count=cython.longlong, how=cython.longlong, i=cython.Py_ssize_t, where=cython.longlong)
    cdef bint _shift(self) noexcept
    @cython.locals(i=cython.Py_ssize_t, k=cython.Py_ssize_t, to=cython.longlong, count=cython.longlong)
    cdef long long _reached(self, long long op, long long s, long long[::1] first, long long[::1] other) noexcept
    @cython.locals(before=cython.longlong, after=cython.longlong, at=cython.longlong)
    cdef long long _beside(self, long long op, long long s) noexcept
    @cython.locals(how=cython.longlong, d=cython.longlong)
    cdef long long _some_devices(self, long long s) noexcept
    @cython.locals(used=cython.longlong, i=cython.Py_ssize_t, d=cython.longlong)
    cdef long long _idle(self) noexcept
    @cython.locals(s=cython.longlong, t=cython.longlong, i=cython.Py_ssize_t)
    cdef bint _join(self) noexcept
    @cython.locals(s=cython.longlong, how=cython.longlong, d=cython.longlong, own=cython.longlong, one=cython.longlong, _=cython.longlong)
    cdef bint _other_devices(self) noexcept
    @cython.locals(count=cython.longlong)
    cdef bint _may(self, long long own) noexcept
    @cython.locals(s=cython.longlong, t=cython.longlong, a=cython.longlong, b=cython.longlong, i=cython.Py_ssize_t, own=cython.longlong, changed=cython.bint)
    cdef bint _exchange(self) noexcept
    @cython.locals(d=cython.longlong, i=cython.Py_ssize_t, own=cython.longlong)
    cdef long long _own_devices(self, long long s) noexcept
    @cython.locals(s=cython.longlong, own=cython.longlong, less=cython.bint, d=cython.longlong, _=cython.longlong)
    cdef bint _resized(self) noexcept
    @cython.locals(d=cython.longlong, own=cython.longlong, s=cython.longlong, count=cython.longlong, _=cython.longlong)
    cdef bint _dealt(self) noexcept
    @cython.locals(i=cython.Py_ssize_t, last=cython.longlong)
    cdef bint _tidy(self, long long s) noexcept
