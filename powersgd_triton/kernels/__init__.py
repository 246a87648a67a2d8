"""Triton kernels over all matrices of a bucket, one kernel a file, its launcher beneath it. Only here is triton used.

A bucket's matrices may have any shapes: programs find their work in tables of integers (``table.py``), so that the
number of launches does not depend on the number of matrices. Split sums go through a workspace and are added in a
fixed order: no atomics, and the same bits wherever the same kernels run on the same sums.
"""
