"""One Python function for each C function, a module for each noun; `ncclpy.bindings` is the public name."""
