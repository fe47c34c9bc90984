/* The source line of a call, kept as the code object and the instruction of a frame: neither keeps the frame, and the
 * user's arrays in it, alive. The line number is computed when it is read. All functions need the GIL. */
#ifndef NCCLPY_SITE_H
#define NCCLPY_SITE_H

#include <Python.h>
#include <frameobject.h>

/* The innermost frame of this thread, borrowed; NULL if the thread runs no Python code. */
static inline PyObject* ncclpy_frame(void) { return (PyObject*)PyEval_GetFrame(); }

/* The frame that has called this one, a new reference; NULL for the outermost. */
static inline PyObject* ncclpy_frame_back(PyObject* frame) {
    return (PyObject*)PyFrame_GetBack((PyFrameObject*)frame);
}

/* The frame's code object, a new reference. */
static inline PyObject* ncclpy_frame_code(PyObject* frame) {
    return (PyObject*)PyFrame_GetCode((PyFrameObject*)frame);
}

/* The offset in bytes of the frame's present instruction, as PyCode_Addr2Line takes it. */
static inline int ncclpy_frame_at(PyObject* frame) {
#if PY_VERSION_HEX >= 0x030B0000
    return PyFrame_GetLasti((PyFrameObject*)frame);
#else
    return ((PyFrameObject*)frame)->f_lasti * 2; /* before 3.11 f_lasti counts instructions */
#endif
}

/* The name of a code's file, borrowed. */
static inline PyObject* ncclpy_code_file(PyObject* code) { return ((PyCodeObject*)code)->co_filename; }

static inline int ncclpy_code_line(PyObject* code, int at) { return PyCode_Addr2Line((PyCodeObject*)code, at); }

#endif
