"""The exit statuses of a command.

0 all equal; 1 a mismatch of value, gradient, protocol, cost or hygiene; 2 a target, option or declaration that cannot
be used; 3 a rank failed; 4 nothing ran; 130 interrupted; 141 standard output has no reader any more.
"""

EQUAL, MISMATCH, USAGE, RANK_FAILED, NOTHING, INTERRUPTED, UNREAD = 0, 1, 2, 3, 4, 130, 141
