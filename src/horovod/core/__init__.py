"""Decides, and does nothing else: requests of all ranks go in, one ordered log of responses comes out.

Pure: no I/O, no clock, no thread, no framework, so everything here is proven by tables, in milliseconds.
"""
