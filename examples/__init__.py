"""Holds programs that use Tarry on real input; each checks what it promises and exits with the verdict."""
