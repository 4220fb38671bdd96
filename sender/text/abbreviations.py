"""Abbreviations whose full stop ends no sentence, in lower case and without that stop.

English, German, French, Spanish and Italian: what contracts, reports and novels use. Those that end sentences as often
("etc.", "Inc.") are left out: a sentence that is cut in two costs less than two that are never told apart.
"""

from __future__ import annotations


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


TITLES = _words(
    """
    mr mrs ms mx dr drs prof st ste rev hon gen col maj capt cmdr lt sgt gov sen rep pres messrs mme mlle mgr
    sr sra srta dra hr fr frl ing dipl dott avv
    vs viz cf approx ca e.g i.e eg ie resp z.b d.h u.a s.o s.u v.a o.g bzw bspw ggf vgl inkl zzgl sog p.ej
    """
)
"""Something always follows."""

BEFORE_NUMBERS = _words(
    """
    no nos nr nrn art arts sec sect fig figs tab p pp s ss vol vols ch chap par para abs ziff ex eq cl ref ver v n num
    núm pág str tel ext app apt rm lit op bk pt jan feb mar apr jun jul aug sep sept oct nov dec
    """
)
"""A number follows; before anything else the same letters may end a sentence."""
