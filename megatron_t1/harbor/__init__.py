"""Bridges to Harbor (Python 3.12): its environments as sandboxes here, our sandboxes and our agent there."""
