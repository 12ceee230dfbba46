"""Who may come in: the certificate and the identities, as their files say now.

A daemon with no such files lets everybody in who reaches its port.
"""
