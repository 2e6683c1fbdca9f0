cimport cython

cdef double NOTHING

cdef class Together:
    cdef Py_ssize_t num_devices
    cdef double[::1] stays, passes
    @cython.locals(d=cython.Py_ssize_t)
    cpdef void clear(self) noexcept
    cpdef void add(self, Py_ssize_t device, double need, double passing) noexcept
    cpdef double most(self, Py_ssize_t device) noexcept
