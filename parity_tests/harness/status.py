"""What a run ends in: an exit status.

Exit status: 0 all equal; 1 a mismatch; 2 usage or declaration; 3 a rank failed; 4 nothing ran; 130 interrupted; 141
nobody reads the output any more.
"""

EQUAL, MISMATCH, USAGE, FAILED, NOTHING, INTERRUPTED, UNREAD = 0, 1, 2, 3, 4, 130, 141
