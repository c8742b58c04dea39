"""How deep a box-shaped hull lies in sea water."""

SEA_WATER = 1025  # kg/m³


def draught(mass, length, beam):
    if length <= 0 or beam <= 0:
        raise ValueError("a hull has a length and a beam")
    return mass / (SEA_WATER * length * beam)
