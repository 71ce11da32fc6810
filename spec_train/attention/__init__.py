"""Attention kernels and masks that the drafts share.

All of them are functions of tensors: no draft, no batch and no file is known here.
"""
