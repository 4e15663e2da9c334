"""Names and codes of countries, case by case and kind by kind."""

import json
from pathlib import Path

import pycountry
import pytest
from hypothesis import given
from hypothesis import strategies as st

from geoguessr_rl import countries
from geoguessr_rl.countries import (
    CODES,
    continent_of,
    label_iso2,
    name_of,
    parent_of,
    to_iso2,
)

TABLE = Path(__file__).parent / "cases" / "countries.jsonl"
CASES = [json.loads(line) for line in TABLE.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("case", CASES, ids=lambda case: repr(case["name"]))
def test_the_table_of_reported_names(case: dict[str, str | None]) -> None:
    assert to_iso2(case["name"]) == case["iso2"]


@pytest.mark.parametrize("code", sorted(CODES))
def test_the_name_of_a_code_reads_back_as_that_code(code: str) -> None:
    assert to_iso2(name_of(code)) == code
    assert to_iso2(f" the {name_of(code).upper()}.") == code


def test_every_iso_name_is_found() -> None:
    for country in pycountry.countries:
        for field in ("name", "common_name", "official_name"):
            if hasattr(country, field):
                assert to_iso2(getattr(country, field)) == country.alpha_2


@pytest.mark.parametrize(
    ("name", "code"),
    [
        # Inverted, in commas and in parentheses.
        ("Korea, South", "KR"),
        ("Korea (North)", "KP"),
        ("Korea, Dem. People's Rep.", None),
        ("Bahamas, The", "BS"),
        ("The Bahamas", "BS"),
        ("Iran (Islamic Republic of)", "IR"),
        ("Moldova, Republic of", "MD"),
        ("Yemen, Republic of", "YE"),
        ("Ireland, Northern", "GB"),
        # Punctuation, accents, case.
        ("St Kitts & Nevis", "KN"),
        ("st. kitts and nevis", "KN"),
        ("CÔTE D'IVOIRE", "CI"),
        ("Türkiye", "TR"),
        ("Réunion", "RE"),
        ("Åland", "AX"),
        ("São Tomé & Príncipe", "ST"),
        ("Timor-Leste", "TL"),
        ("U. S. A.", "US"),
        ("**Kenya**\n", "KE"),
        # Everyday, former, short and own names.
        ("Viet Nam", "VN"),
        ("Russian Federation", "RU"),
        ("Scotland", "GB"),
        ("Wales", "GB"),
        ("UAE", "AE"),
        ("DRC", "CD"),
        ("Democratic Republic of Congo", "CD"),
        ("Republic of the Congo", "CG"),
        ("Congo-Brazzaville", "CG"),
        ("Czech Republic", "CZ"),
        ("Eswatini", "SZ"),
        ("East Timor", "TL"),
        ("Micronesia", "FM"),
        ("Brunei", "BN"),
        ("Moldova", "MD"),
        ("Macao", "MO"),
        ("Bosnia", "BA"),
        ("Bosnia-Herzegovina", "BA"),
        ("Palestinian Territories", "PS"),
        ("Western Sahara", "EH"),
        ("Republic of Ireland", "IE"),
        ("Republic of Turkey", "TR"),
        ("Republic of China", "TW"),
        ("People's Republic of China", "CN"),
        ("Hong Kong", "HK"),
        ("Sint Maarten", "SX"),
        ("Deutschland", "DE"),
        ("España", "ES"),
        ("Ceylon", "LK"),
        ("Falkland", "FK"),
        # The last part counts, unless the first is a territory of it.
        ("Paris, France", "FR"),
        ("Vancouver, BC, Canada", "CA"),
        ("Tbilisi, Georgia", "GE"),
        ("Georgia (USA)", "US"),
        ("Aruba, Netherlands", "AW"),
        ("Puerto Rico, USA", "PR"),
        ("Hong Kong (China)", "HK"),
        ("Georgia (country)", "GE"),
        ("Myanmar (Burma)", "MM"),
        ("Springfield, IL", None),  # a code is no name, in any place
        ("Lebanon, Pennsylvania", None),
        # More than one country, or none.
        ("Virgin Islands", None),
        ("Yugoslavia", None),
        ("Czechoslovakia", None),
        ("Netherlands Antilles", None),
        ("Soviet Union", None),
        ("Spain/Portugal", None),
        ("South", None),
        ("Papua", None),
        ("Dutch", None),
        ("Ocean", None),
        ("American", None),
        ("Republic", None),
        ("Republic of", None),
        ("the", None),
        ("Texas", None),
        ("Mexico City", None),
        ("Europe", None),
        ("(", None),
        (",", None),
        # Codes and numbers are no names.
        ("NA", None),
        ("fr", None),
        ("DEU", None),
        ("840", None),
        ("null", None),
    ],
)
def test_the_kinds_behind_the_table(name: str, code: str | None) -> None:
    assert to_iso2(name) == code


@pytest.mark.parametrize("code", sorted(CODES - {"US"}))
def test_a_two_letter_code_is_no_answer(code: str) -> None:
    assert to_iso2(code) is None
    assert to_iso2(code.lower()) is None


@given(st.text(st.characters()))
def test_any_text_gives_a_code_or_none(text: str) -> None:
    assert to_iso2(text) in CODES | {None}


def test_territories_count_as_their_parent_and_countries_as_themselves() -> None:
    assert [parent_of(code) for code in ("PR", "RE", "HK", "GL", "XK", "TW", "FR")] == [
        *("US", "FR", "CN", "DK", "XK", "TW", "FR")
    ]
    assert {parent_of(parent_of(code)) for code in CODES} == {parent_of(code) for code in CODES}
    assert {parent_of(code) for code in CODES} <= CODES


@pytest.mark.parametrize(
    ("raw", "city", "code"),
    [
        ("NA", None, "NA"),
        ("NMB", None, "NA"),
        (None, "Windhoek", "NA"),
        ("", "Lüderitz", "NA"),
        (" fr ", "Paris", "FR"),
        ("XK", None, "XK"),
        (None, "Paris", None),
        (None, None, None),
        ("UK", "London", None),  # an everyday name of a country, and no code
        ("ZZ", "Windhoek", None),  # a wrong label is not a lost one
        ("France", "Paris", None),
    ],
)
def test_labels_are_codes_and_namibia_is_not_missing(
    raw: str | None, city: str | None, code: str | None
) -> None:
    assert label_iso2(raw, city) == code


def test_the_name_of_an_unknown_code_raises() -> None:
    with pytest.raises(KeyError):
        name_of("ZZ")


def test_every_code_lies_on_one_continent() -> None:
    listed = [code for codes in countries._CONTINENT_CODES.values() for code in codes.split()]
    assert len(listed) == len(set(listed)) and set(listed) == CODES
    assert [continent_of(code) for code in ("NA", "XK", "TR", "RU", "US", "TL", "GF")] == [
        "Africa", "Europe", "Asia", "Europe", "North America", "Oceania", "South America",
    ]  # fmt: skip
