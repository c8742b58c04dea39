"""How deep a ship may lie in the water."""

SEASONS = {"tropical": 1 / 48, "summer": 0.0, "winter": -1 / 48}


def freeboard(summer_draught: float, depth: float, season: str) -> float:
    """Height of the deck above the water, in the unit of the arguments."""
    if summer_draught <= 0 or depth <= summer_draught:
        raise ValueError("the deck would be under water")
    return depth - summer_draught * (1 + SEASONS[season])
