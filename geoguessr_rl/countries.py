"""Country names as models write them, and the ISO 3166-1 codes that labels carry.

An answer is a name ("South Korea", "Korea, South", "Republic of Korea"), a label is an alpha-2 code
("KR"). Both directions are here, so that nothing else spells a country. ISO's own names come from
`pycountry`; the tables below hold only what people write instead. Places inside a country are not
resolved: "Texas" names no country, and "Austin, USA" does by its last part.
"""

import re
import unicodedata
from functools import lru_cache

import pycountry

# What a model would write where ISO's name is not that. Kosovo has no ISO name; its code is the
# user-assigned one that OSV-5M's labels carry.
_EVERYDAY_NAMES = {
    "BN": "Brunei",
    "CC": "Cocos Islands",
    "CD": "Democratic Republic of the Congo",
    "CG": "Republic of the Congo",
    "CI": "Ivory Coast",
    "CV": "Cape Verde",
    "FK": "Falkland Islands",
    "FM": "Micronesia",
    "MF": "Saint Martin",
    "PN": "Pitcairn Islands",
    "PS": "Palestine",
    "RU": "Russia",
    "SH": "Saint Helena",
    "SX": "Sint Maarten",
    "TR": "Turkey",
    "VA": "Vatican City",
    "VG": "British Virgin Islands",
    "VI": "U.S. Virgin Islands",
    "XK": "Kosovo",
}

# Other names, separated by commas: short forms, former names with one successor, parts that people
# name instead of the whole, endonyms in Latin script, frequent misspellings. Written as `_clean`
# leaves them, or close to it.
_ALIASES = {
    "AE": "UAE, Emirates",
    "AG": "Antigua, Barbuda",
    "AL": "Shqiperia",
    "AT": "Osterreich",
    "AX": "Aland",
    "BA": "Bosnia, Bosna i Hercegovina",
    "BE": "Belgie, Belgien, Belgique",
    "BF": "Burkina, Upper Volta",
    "BJ": "Dahomey",
    "BQ": "Bonaire, Caribbean Netherlands, Saba, Sint Eustatius",
    "BR": "Brasil",
    "BY": "Belorussia, Byelorussia",
    "CC": "Keeling Islands",
    "CD": "Congo DR, Congo DRC, Congo Kinshasa, DR Congo, DRC, Zaire",
    "CG": "Congo Brazzaville, Congo Republic",
    "CH": "Schweiz, Suisse, Svizzera",
    "CI": "Cote d Ivoire",
    "CN": "Mainland China, PRC",
    "CO": "Columbia",
    "CZ": "Ceska republika, Cesko",
    "DE": "Deutschland, East Germany, West Germany",
    "DK": "Danmark",
    "DO": "Republica Dominicana",
    "EE": "Eesti",
    "ES": "Espana",
    "ET": "Abyssinia",
    "FI": "Suomi",
    "FK": "Falklands, Islas Malvinas, Malvinas",
    "FO": "Faeroe Islands, Faroes",
    "GB": "UK, Britain, Cymru, England, Great Britain, Northern Ireland, Scotland, Wales",
    "GF": "Guyane, Guyane francaise",
    "GR": "Ellada, Hellas",
    "HK": "Hong Kong China, Hong Kong SAR, Hong Kong SAR China, Hongkong",
    "HR": "Hrvatska",
    "HU": "Magyarorszag",
    "IE": "Eire",
    "IN": "Bharat",
    "IR": "Persia",
    "IT": "Italia",
    "JP": "Nihon, Nippon",
    "KE": "Kenia",
    "KH": "Kampuchea",
    "KN": "Nevis, Saint Kitts",
    "KP": "DPRK, N Korea",
    "KR": "Korea, ROK, S Korea",
    "KZ": "Kazakstan",
    "LA": "Lao, Lao PDR",
    "LK": "Ceylon",
    "LT": "Lietuva",
    "LV": "Latvija",
    "MK": "FYROM, Former Yugoslav Republic of Macedonia, Macedonia, Severna Makedonija",
    "MM": "Burma",
    "MO": "Macao SAR, Macau, Macau SAR",
    "MP": "CNMI, Northern Marianas, Saipan",
    "NL": "Holland, Nederland",
    "NO": "Noreg, Norge",
    "NZ": "Aotearoa, Aotearoa New Zealand",
    "PF": "Tahiti",
    "PG": "PNG",
    "PH": "Philipines, Phillipines, Pilipinas",
    "PL": "Polska",
    "PS": "Gaza, Gaza Strip, Occupied Palestinian Territories, Occupied Palestinian Territory, "
    "Palestinian Authority, Palestinian Territories, Palestinian Territory, West Bank",
    "RE": "La Reunion, Reunion Island",
    "RS": "Srbija",
    "SA": "KSA, Saudi",
    "SE": "Sverige",
    "SH": "Ascension, Ascension Island, Tristan da Cunha",
    "SI": "Slovenija",
    "SJ": "Jan Mayen, Spitsbergen, Svalbard",
    "SK": "Slovensko",
    "SR": "Surinam",
    "SX": "Saint Maarten",
    "SZ": "Swaziland",
    "TF": "French Southern Antarctic Lands",
    "TH": "Siam",
    "TL": "East Timor",
    "TT": "Tobago, Trinidad",
    "TW": "Chinese Taipei, Formosa, Republic of China, Taiwan China, Taiwan ROC",
    "US": "US, USA, U S, U S A, America",
    "VA": "Holy See, Vatican",
    "VC": "Saint Vincent",
    "VG": "BVI",
    "VI": "United States Virgin Islands, USVI",
    "WS": "Western Samoa",
    "ZA": "RSA",
    "ZW": "Rhodesia",
}

# Territories by the country that they belong to. Disputed places (EH, PS, TW, XK) are their own.
_TERRITORIES = {
    "AU": "CC CX HM NF",
    "CN": "HK MO",
    "DK": "FO GL",
    "FI": "AX",
    "FR": "BL GF GP MF MQ NC PF PM RE TF WF YT",
    "GB": "AI BM FK GG GI GS IM IO JE KY MS PN SH TC VG",
    "NL": "AW BQ CW SX",
    "NO": "BV SJ",
    "NZ": "CK NU TK",
    "US": "AS GU MP PR UM VI",
}
_PARENTS = {code: parent for parent, codes in _TERRITORIES.items() for code in codes.split()}

# By GeoNames' countryInfo (CC BY 4.0), in which Russia and Cyprus are Europe, Turkey is Asia.
_CONTINENT_CODES = {
    "Africa": (
        "DZ AO BJ BW BF BI CV CM CF TD KM CG CD CI DJ EG GQ ER SZ ET GA GM GH GN GW KE LS LR LY MG "
        "MW ML MR MU YT MA MZ NA NE NG RE RW SH ST SN SC SL SO ZA SS SD TZ TG TN UG EH ZM ZW"
    ),
    "Antarctica": "AQ BV TF GS HM",
    "Asia": (
        "AF AM AZ BH BD BT IO BN KH CN CX CC GE HK IN ID IR IQ IL JP JO KZ KW KG LA LB MO MY MV MN "
        "MM NP KP OM PK PS PH QA SA SG KR LK SY TW TJ TH TR TM AE UZ VN YE"
    ),
    "Europe": (
        "AX AL AD AT BY BE BA BG HR CY CZ DK EE FO FI FR DE GI GR GG HU IS IE IM IT JE XK LV LI LT "
        "LU MT MD MC ME NL MK NO PL PT RO RU SM RS SK SI ES SJ SE CH UA GB VA"
    ),
    "North America": (
        "AI AG AW BS BB BZ BM BQ CA KY CR CU CW DM DO SV GL GD GP GT HT HN JM MQ MX MS NI PA PR BL "
        "KN LC MF PM VC SX TT TC US VG VI"
    ),
    "Oceania": ("AS AU CK FJ PF GU KI MH FM NR NC NZ NU NF MP PW PG PN WS SB TL TK TO TV UM VU WF"),
    "South America": "AR BO BR CL CO EC FK GF GY PY PE SR UY VE",
}
_CONTINENTS = {code: name for name, codes in _CONTINENT_CODES.items() for code in codes.split()}

# CSV readers take Namibia's code NA for "not available"; the row's city gives it away.
_NAMIBIAN_CITIES = frozenset(
    {
        "gobabis",
        "grootfontein",
        "henties bay",
        "katima mulilo",
        "keetmanshoop",
        "luderitz",
        "mariental",
        "okahandja",
        "ondangwa",
        "ongwediva",
        "opuwo",
        "oshakati",
        "otjiwarongo",
        "outapi",
        "outjo",
        "rundu",
        "swakopmund",
        "tsumeb",
        "walvis bay",
        "windhoek",
    }
)

_APOSTROPHES_AND_DOTS = re.compile("['’‘`´ʼ.]")  # noqa: RUF001 - the look-alikes are the point
_SEPARATORS = re.compile(r"[\W_]+")
_SKIPPED_WORDS = frozenset({"the", "and"})  # "The Gambia", "Trinidad & Tobago"
_PARENTHESIS = re.compile(r"([^()]+)\(([^()]+)\)\s*")
_FORM_OF_STATE = re.compile(r"(?:republic|kingdom|commonwealth) of (.+)")


def _clean(name: str) -> str:
    """Reduces a name to its plain words: "The St. Kitts & Nevis" -> "saint kitts nevis"."""
    decomposed = unicodedata.normalize("NFKD", name)
    letters = "".join(char for char in decomposed if not unicodedata.combining(char))
    words = _SEPARATORS.sub(" ", _APOSTROPHES_AND_DOTS.sub("", letters.casefold())).split()
    return " ".join(
        "saint" if word == "st" else word for word in words if word not in _SKIPPED_WORDS
    )


_COUNTRIES = {country.alpha_2: country for country in pycountry.countries}

CODES = frozenset(_COUNTRIES | _EVERYDAY_NAMES)
"""Every code that a label can carry: ISO 3166-1 alpha-2, and `XK`."""


def _iso_names(*fields: str) -> dict[str, str]:
    """Returns the code of each cleaned name that ISO gives in these fields."""
    return {
        _clean(getattr(country, field)): code
        for code, country in _COUNTRIES.items()
        for field in fields
        if hasattr(country, field)
    }


_SHORT_NAMES = _iso_names("name", "common_name")
# Later entries win, so that no alias ever hides a country's own name.
_CODE_BY_NAME = (
    {_clean(alias): code for code, aliases in _ALIASES.items() for alias in aliases.split(", ")}
    | {_clean(name): code for code, name in _EVERYDAY_NAMES.items()}
    | _iso_names("official_name")
    | _SHORT_NAMES
)


@lru_cache(maxsize=8192)
def to_iso2(name: str) -> str | None:
    """Finds the country that an answer names.

    Tries, in this order: ISO's names and the aliases; the inverted form ("Korea, South"); the last
    part of "X, Y" ("Georgia, USA"), unless X is a territory of Y ("Aruba, Netherlands"); the
    beginning of one country's own name ("Falkland"). "X (Y)" reads like "X, Y", else as X.

    Args:
        name: Any text. Case, accents, punctuation, and the words "the" and "and" do not matter.

    Returns:
        The alpha-2 code, or None where the text names no country or more than one. Codes are not
        names: "NA" and "fr" give None, while "UK" and "US" are everyday names.
    """
    if code := _lookup(name):
        return code
    parenthesis = _PARENTHESIS.fullmatch(name)
    place, region = parenthesis.groups() if parenthesis else name.rpartition(",")[::2]
    if place:
        if code := _lookup(f"{region} {place}"):
            return code
        inner, outer = _lookup(place), _lookup(region)
        if inner and (parent_of(inner) == outer or (parenthesis and not outer)):
            return inner
        if outer:
            return outer
    return _begins_one_name(name)


def name_of(iso2: str) -> str:
    """Returns the English name that a model would write for a code; `to_iso2` reads it back.

    Raises:
        KeyError: The code is not in `CODES`.
    """
    if iso2 in _EVERYDAY_NAMES:
        return _EVERYDAY_NAMES[iso2]
    country = _COUNTRIES[iso2]
    return getattr(country, "common_name", country.name)


def parent_of(iso2: str) -> str:
    """Returns the code of the country that a territory belongs to ("PR" -> "US"), or `iso2`."""
    return _PARENTS.get(iso2, iso2)


def continent_of(iso2: str) -> str:
    """Returns the English name of a code's continent."""
    return _CONTINENTS[iso2]


def label_iso2(raw: str | None, city: str | None) -> str | None:
    """Reads the country of a CSV row, and repairs the one label that CSV readers lose.

    Args:
        raw: The country cell. Labels are codes: a name gives None.
        city: The city cell, which tells a lost Namibian "NA" from a label that never was.

    Returns:
        A code out of `CODES`, or None where the row has no usable label.
    """
    code = (raw or "").strip().upper()
    if code == "NMB" or (not code and _clean(city or "") in _NAMIBIAN_CITIES):
        return "NA"
    return code if code in CODES else None


def _lookup(name: str) -> str | None:
    """Finds a name in the tables, with or without a leading "Republic of" and the like."""
    words = _clean(name)
    form = _FORM_OF_STATE.fullmatch(words)
    return _CODE_BY_NAME.get(words) or (_CODE_BY_NAME.get(form[1]) if form else None)


def _begins_one_name(name: str) -> str | None:
    """Finds the only country whose own name begins with these words, if no province has them."""
    words = _clean(name)
    owners = {code for own, code in _SHORT_NAMES.items() if words and own.startswith(f"{words} ")}
    if len(owners) != 1:
        return None
    # "Papua" begins one country's name and is a province of another. Only pycountry's search
    # knows provinces; alone it would read "None" as Italy and "Island" as the Comoros.
    try:
        hits = {country.alpha_2 for country in pycountry.countries.search_fuzzy(name)}
    except LookupError:
        hits = set()
    return owners.pop() if hits <= owners else None
