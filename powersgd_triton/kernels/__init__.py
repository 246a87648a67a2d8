"""Triton kernels over all matrices of a bucket: one kernel a file, with its launcher below. Only here is triton used.

Each program of a kernel finds its work in a table of integers, so the number of launches does not depend on the number
of matrices. Sums that are split are added in a fixed order: the same input gives the same bits on every worker.
"""
