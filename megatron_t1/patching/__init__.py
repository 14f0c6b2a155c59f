"""Patches for existing Megatron checkouts: places named by syntax, our own lines, all or nothing, and back again.

The checkout is foreign: it is read and written as text, never imported or run. Needs libcst (extra `patch`).
"""
