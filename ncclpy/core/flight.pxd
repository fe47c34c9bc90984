# Keep objects until all of `until` are over: threads that have ended, Calls that have returned, Events that are
# reached. What is over already is not kept. `what` is for people.
cdef int hold(list objects, list until, object what) except -1
