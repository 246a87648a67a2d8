"""Triton kernels over all matrices of a bucket: one kernel a file, with its launcher below. Only here is triton used.

A bucket's matrices may have any shapes. Each program of a kernel finds its work in a table of integers, so the number
of launches does not depend on the number of matrices. ``columns.py`` says what the tables contain, ``table.py`` and
``wire_table.py`` build them on the host, ``table_device.py`` and ``wire_device.py`` read them in the kernels.

Sums that are split go through a workspace and are added in a fixed order, without atomics: the same kernels give the
same bits for the same input, on every worker.
"""
