/* Which line of Python has made a call: the code object and where in it a frame was. Neither keeps a frame alive, in
 * which arrays hang, and the line's number is looked up when it is read. All of it with the GIL. */
#ifndef NCCLPY_SITE_H
#define NCCLPY_SITE_H

#include <Python.h>
#include <frameobject.h>

/* The innermost frame of this thread, borrowed; NULL where no Python runs. */
static inline PyObject* ncclpy_frame(void) { return (PyObject*)PyEval_GetFrame(); }

/* The frame that has called it, a new reference; NULL for the outermost. */
static inline PyObject* ncclpy_frame_back(PyObject* frame) {
    return (PyObject*)PyFrame_GetBack((PyFrameObject*)frame);
}

/* Its code, a new reference. */
static inline PyObject* ncclpy_frame_code(PyObject* frame) {
    return (PyObject*)PyFrame_GetCode((PyFrameObject*)frame);
}

/* Where in its code it is, in bytes, as PyCode_Addr2Line takes it. */
static inline int ncclpy_frame_at(PyObject* frame) {
#if PY_VERSION_HEX >= 0x030B0000
    return PyFrame_GetLasti((PyFrameObject*)frame);
#else
    return ((PyFrameObject*)frame)->f_lasti * 2; /* which counts instructions there */
#endif
}

/* The name of a code's file, borrowed. */
static inline PyObject* ncclpy_code_file(PyObject* code) { return ((PyCodeObject*)code)->co_filename; }

static inline int ncclpy_code_line(PyObject* code, int at) { return PyCode_Addr2Line((PyCodeObject*)code, at); }

#endif
