"""Points -> administrative names, by OSV-5M's own protocol: the nearest populated place.

`reverse_geocoder` finds the nearest GeoNames city in degrees of latitude and longitude. That is no
distance on the globe, and near the poles or the antimeridian not the nearest place; it is how the
dataset was labelled and how its authors score, so that only the same gives comparable figures.
"""

from collections.abc import Mapping, Sequence

from geoguessr_rl.eval_metrics import Hits, place_hits
from geoguessr_rl.records import Place, Prediction


def nearest_places(points: Sequence[tuple[float, float]]) -> list[Place]:
    """Returns the populated place nearest to each (latitude, longitude) in decimal degrees."""
    import reverse_geocoder  # reads 8 MB of cities

    if not points:
        return []
    found = reverse_geocoder.search(list(points), mode=1, verbose=False)
    return [Place(row["cc"], row["admin1"], row["admin2"], row["name"]) for row in found]


def look_up_hits(rows: Sequence[Prediction], truth: Mapping[str, Place]) -> Hits:
    """Looks up which administrative names each predicted point meets; see `place_hits`.

    Args:
        rows: Predictions.
        truth: Each photo's labels, by its id.
    """
    placed = [
        (row.pred_latitude, row.pred_longitude)
        for row in rows
        if row.pred_latitude is not None and row.pred_longitude is not None
    ]
    names = iter(nearest_places(placed))
    return {
        (row.id, row.sample): place_hits(
            truth[row.id], next(names) if row.pred_latitude is not None else None
        )
        for row in rows
    }
