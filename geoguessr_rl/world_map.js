// The browser's half of world_map.py: Gradio runs this text as the body of a function that gets
// `element`, `props`, `trigger` and `watch` of one gr.HTML, once it stands on the page.
//
// Plain SVG and no map library: those at hand (Leaflet, MapLibre, OpenLayers, d3) would have to be
// packed into the page too, bring no outlines of their own, and take tiles from a network.
//
// Labels are text that a model or a file's name may have written: they are set with textContent
// alone, and nothing here builds HTML from a string.

const { size, land, borders } = window.worldMap; // put there by head()
const MAX_ZOOM = 64;
const FIT_ZOOM = 16; // the closest that pins from Python are shown
const FIT_ONE = 4; // the same for a single pin, so that one sees where on Earth it is
const DRAG = 5; // pixels: what moves less is a click
const STEP = 20; // pixels an arrow key moves; a tenth with Shift
const PAD = 0.03 * size; // sea beyond ±180°, so that a pin in Fiji does not lie on the edge
const HOME_Y = 0.435; // the middle of the inhabited latitudes, from the top of the square
const EARTH_KM = 6371.0088; // as in reward.py
const MAX_TILES = 40;
const MAX_LABEL = 32; // characters; the whole stands in the tool tip

// Each kind has a colour, a shape and a letter of its own; the colours are Okabe and Ito's, which
// stay apart for colour-blind people. Later ones are drawn above earlier ones.
const KINDS = {
  sample: { name: "Sample", many: "Samples", shape: dot(5), fill: "#56b4e9", radius: 5 },
  consensus: { name: "Consensus", shape: "M0-13L12 8H-12z", fill: "#f0e442", letter: "C", dark: true },
  base: { name: "Base model", shape: "M-9-9h18v18h-18z", fill: "#e69f00", letter: "B", dark: true },
  trained: { name: "Trained model", shape: dot(10), fill: "#0072b2", letter: "T" },
  gps: { name: "Photo's GPS", shape: "M0-13L13 0 0 13-13 0z", fill: "#cc79a7", letter: "G", dark: true },
  truth: { name: "Truth", shape: star(14, 6), fill: "#009e73" },
  guess: {
    name: "Your guess",
    shape: "M0 0C-2-6-9-10-9-18a9 9 0 1 1 18 0C9-10 2-6 0 0z",
    fill: "#d55e00",
    letter: "•",
    lift: 18, // the tip marks the place, so the letter sits above it
  },
};

function dot(r) {
  return `M${-r} 0a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0z`;
}

function star(outer, inner) {
  const corner = (_, i) => {
    const radius = i % 2 ? inner : outer;
    const angle = (i * Math.PI) / 5;
    return `${(radius * Math.sin(angle)).toFixed(1)} ${(-radius * Math.cos(angle)).toFixed(1)}`;
  };
  return `M${Array.from({ length: 10 }, corner).join("L")}z`;
}

// ---- the globe -----------------------------------------------------------------------------

const radians = (degrees) => (degrees * Math.PI) / 180;
const degrees = (angle) => (angle * 180) / Math.PI;
const between = (low, value, high) => Math.max(low, Math.min(high, value));
const isPlace = (p) => p && Number.isFinite(p.lat) && Number.isFinite(p.lon);

function project(lat, lon) {
  const sine = Math.sin(radians(between(-85.0511, lat, 85.0511)));
  return [((lon + 180) / 360) * size, (0.5 - Math.atanh(sine) / (2 * Math.PI)) * size];
}

function unproject(x, y) {
  const lat = degrees(Math.atan(Math.sinh(Math.PI * (1 - (2 * y) / size))));
  const lon = (((x + size) % size) / size) * 360 - 180; // beyond an edge the other one begins
  return { lat: Number(lat.toFixed(5)), lon: Number(lon.toFixed(5)) };
}

// Lets a line run past ±180° where it would jump from one edge of the map to the other.
function unwrap(points) {
  let before = points[0][0];
  return points.map(([x, y]) => {
    before = x + Math.round((before - x) / size) * size;
    return [before, y];
  });
}

// A line that runs past an edge comes in again at the other: drawn once for each turn.
function pathOf(points, end = "") {
  const turn = (shift) =>
    `M${points.map(([x, y]) => `${(x + shift).toFixed(1)} ${y.toFixed(1)}`).join("L")}${end}`;
  return [-size, 0, size].map(turn).join("");
}

function greatCircle([lat0, lon0], [lat1, lon1]) {
  const vector = (lat, lon) => [
    Math.cos(radians(lat)) * Math.cos(radians(lon)),
    Math.cos(radians(lat)) * Math.sin(radians(lon)),
    Math.sin(radians(lat)),
  ];
  const [a, b] = [vector(lat0, lon0), vector(lat1, lon1)];
  const angle = Math.acos(between(-1, a[0] * b[0] + a[1] * b[1] + a[2] * b[2], 1));
  const steps = Math.max(1, Math.ceil(degrees(angle) / 2));
  const points = Array.from({ length: steps + 1 }, (_, i) => {
    const [p, q] = [Math.sin(((steps - i) / steps) * angle), Math.sin((i / steps) * angle)];
    const [x, y, z] = a.map((_, axis) => p * a[axis] + q * b[axis]);
    return project(degrees(Math.atan2(z, Math.hypot(x, y))), degrees(Math.atan2(y, x)));
  });
  // The ends as they are: the sum above is nought for places that coincide or are opposite.
  points[0] = project(lat0, lon0);
  points[steps] = project(lat1, lon1);
  return unwrap(points);
}

// All places `km` from one, as a ring, and the area within as a path.
function geodesicCircle({ lat, lon, km }) {
  const radius = km / EARTH_KM;
  const points = Array.from({ length: 73 }, (_, i) => {
    const bearing = (i * 2 * Math.PI) / 72;
    const sine =
      Math.sin(radians(lat)) * Math.cos(radius) +
      Math.cos(radians(lat)) * Math.sin(radius) * Math.cos(bearing);
    const east = Math.atan2(
      Math.sin(bearing) * Math.sin(radius) * Math.cos(radians(lat)),
      Math.cos(radius) - Math.sin(radians(lat)) * sine,
    );
    return project(degrees(Math.asin(between(-1, sine, 1))), lon + degrees(east));
  });
  const ring = unwrap(points);
  const world = `M0 0H${size}V${size}H0z`;
  const north = radians(90 - lat) < radius;
  const south = radians(90 + lat) < radius;
  if (radius >= Math.PI) return { ring, area: world };
  // What holds both poles is the world but for the circle around the opposite place.
  if (north && south) return { ring, area: world + pathOf(ring, "z") };
  if (!north && !south) return { ring, area: pathOf(ring, "z") };
  const edge = north ? 0 : size; // what holds one pole reaches that edge of the map everywhere
  return { ring, area: pathOf([...ring, [ring[72][0], edge], [ring[0][0], edge]], "z") };
}

// ---- the page ------------------------------------------------------------------------------

function svg(parent, tag, attributes = {}) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  parent.append(made);
  return made;
}

function html(parent, tag, attributes = {}, text = "") {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.textContent = text;
  parent.append(made);
  return made;
}

const root = element.querySelector(".world-map");
const stage = html(root, "div", { class: "stage" });
const keys = props.clickable
  ? "Arrow keys move the cross-hair, with Shift in small steps; Enter drops the pin"
  : "Arrow keys move the map";
const frame = html(stage, "div", {
  class: "frame",
  tabindex: 0,
  role: "application",
  "aria-label": `${props.label}. ${keys}; plus and minus zoom, 0 shows the whole world.`,
});
const picture = svg(frame, "svg", { "aria-hidden": true });
const globe = svg(picture, "g");
svg(globe, "path", { class: "land", d: land });
const tiles = svg(globe, "g", { class: "tiles" });
svg(globe, "path", { class: "border", d: borders });
const area = svg(globe, "path", { class: "area" });
const rim = svg(globe, "path", { class: "rim" });
const lineHalo = svg(globe, "path", { class: "line halo" });
const lines = svg(globe, "path", { class: "line" });
const pins = svg(picture, "g", { class: "pins" });
const labels = svg(picture, "g", { class: "labels" });
const cross = svg(picture, "path", {
  class: "cross",
  d: "M-16 0H-4M4 0H16M0-16V-4M0 4V16M-1 0H1",
});
const buttons = html(stage, "div", { class: "buttons" });
const credit = props.tiles ? props.attribution : "Natural Earth";
html(stage, "div", { class: "credit" }, credit);
const legend = html(root, "ul", { class: "legend" });
const said = html(root, "p", { class: "said", role: "status" });

function button(text, label, action) {
  html(buttons, "button", { type: "button", "aria-label": label, title: label }, text) //
    .addEventListener("click", action);
}
button("+", "Zoom in", () => zoom(2, width / 2, height / 2));
button("−", "Zoom out", () => zoom(0.5, width / 2, height / 2));
button("⌂", "Show the whole world", () => home());

// ---- the view: which place of the map's square is in the middle, and how large --------------

let [width, height] = [0, 0]; // pixels; nought while the map is on a hidden tab
let view = { zoom: 1, x: size / 2, y: HOME_Y * size };
let fitWhenSeen = false;
let aim = null; // the cross-hair's place on the map's square, while the keyboard moves it

const unit = () => width / (size + 2 * PAD); // pixels a unit of the square, at zoom 1
const scale = () => view.zoom * unit();
const least = () => Math.max(1, height / (unit() * size)); // the smallest zoom that fills the frame
const toScreen = ([x, y]) => [
  (x - view.x) * scale() + width / 2,
  (y - view.y) * scale() + height / 2,
];
const toMap = (x, y) => [
  view.x + (x - width / 2) / scale(),
  view.y + (y - height / 2) / scale(),
];

function look(next) {
  view = { ...view, ...next };
  view.zoom = between(least(), view.zoom, MAX_ZOOM);
  const [w, h] = [width / 2 / scale(), height / 2 / scale()];
  view.x = between(w - PAD, view.x, size + PAD - w);
  view.y = between(h, view.y, size - h);
  // A finger scrolls the page past a map that has no more to show at its sides.
  frame.style.touchAction = view.zoom > least() ? "none" : "pan-y";
  later();
}

const home = () => look({ zoom: 1, x: size / 2, y: HOME_Y * size });
const pan = (dx, dy) => look({ x: view.x - dx / scale(), y: view.y - dy / scale() });

// Zooms so that what is under a point of the screen stays there.
function zoom(factor, x, y) {
  const [mapX, mapY] = toMap(x, y);
  view.zoom = between(least(), view.zoom * factor, MAX_ZOOM);
  look({ x: mapX - (x - width / 2) / scale(), y: mapY - (y - height / 2) / scale() });
}

function fit() {
  fitWhenSeen = !width;
  if (!width || !places.length) return;
  const margin = Math.min(80, width / 6);
  const most = new Set([...places, ...reach].map(String)).size > 1 ? FIT_ZOOM : FIT_ONE;
  const around = (points) => {
    const [xs, ys] = [points.map((p) => p[0]), points.map((p) => p[1])];
    const [left, right] = [Math.min(...xs), Math.max(...xs)];
    const [top, bottom] = [Math.min(...ys), Math.max(...ys)];
    const room = (pixels, length) => (pixels - 2 * margin) / Math.max(length, 1e-9);
    const wanted = Math.min(room(width, right - left), room(height, bottom - top)) / unit();
    return { zoom: Math.min(wanted, most), x: (left + right) / 2, y: (top + bottom) / 2 };
  };
  const all = around([...places, ...reach]);
  look(all.zoom < 1 ? around(places) : all);
}

// ---- what Python sends ----------------------------------------------------------------------

let click = { picked: "", turn: 0 }; // beyond ±180°, the person's pin stays where they clicked
let drawn = "[[],[],null]"; // what Python sent last, without the person's own pin
let places = []; // where the pins stand, on the map's square
let reach = []; // the lines and the circle, which the view holds too if there is room
let marks = []; // { at, group, label } of each pin

function update() {
  const value = props.value && typeof props.value === "object" ? props.value : {};
  const sent = (value.pins ?? []).filter(isPlace);
  const links = value.lines ?? [];
  const circle = isPlace(value.circle) && value.circle.km > 0 ? value.circle : null;
  const own = isPlace(value.picked) && !sent.some((pin) => pin.kind === "guess");
  const turn = JSON.stringify(value.picked) === click.picked ? click.turn : 0;
  const all = own ? [...sent, { ...value.picked, kind: "guess", turn }] : sent;

  const arcs = links.map((link) => greatCircle(link.from, link.to));
  const ring = circle ? geodesicCircle(circle) : null;
  const d = arcs.map((points) => pathOf(points)).join("");
  lines.setAttribute("d", d);
  lineHalo.setAttribute("d", d);
  area.setAttribute("d", ring ? ring.area : "");
  rim.setAttribute("d", ring ? pathOf(ring.ring) : "");
  places = all.map(placeOf);
  reach = [...arcs.flat(), ...(ring?.ring ?? [])].map(([x, y]) => [between(0, x, size), y]);
  drawPins(all);
  drawLegend(all, circle);
  frame.classList.toggle("clickable", canPick());

  const now = JSON.stringify([sent, links, circle]);
  if (now !== drawn) {
    const before = JSON.parse(drawn)[0].length;
    drawn = now;
    if (sent.length) fit();
    else if (before) home(); // a new round begins: nothing gives the place away
  }
  later();
}

function placeOf(pin) {
  const [x, y] = project(pin.lat, pin.lon);
  return [x + (pin.turn ?? 0), y];
}

const kindOf = (pin) => KINDS[Object.hasOwn(KINDS, pin.kind) ? pin.kind : "sample"];
const textOf = (pin) => (typeof pin.label === "string" ? pin.label.trim() : "");

function symbol(parent, kind) {
  svg(parent, "path", { class: "mark", d: kind.shape, fill: kind.fill });
  if (!kind.letter) return;
  svg(parent, "text", { class: kind.dark ? "letter dark" : "letter", y: 4.5 - (kind.lift ?? 0) })
    .textContent = kind.letter;
}

function drawPins(all) {
  pins.replaceChildren();
  labels.replaceChildren();
  const order = Object.values(KINDS);
  const sorted = [...all].sort((a, b) => order.indexOf(kindOf(a)) - order.indexOf(kindOf(b)));
  marks = sorted.map((pin) => {
    const kind = kindOf(pin);
    const group = svg(pins, "g", { class: "pin", "data-kind": pin.kind });
    svg(group, "title").textContent = [kind.name, textOf(pin)].filter(Boolean).join(": ");
    symbol(group, kind);
    const letters = Array.from(textOf(pin));
    let label = null;
    if (letters.length && kind !== KINDS.sample) {
      label = svg(labels, "text");
      label.textContent =
        letters.length > MAX_LABEL ? `${letters.slice(0, MAX_LABEL - 1).join("")}…` : letters.join("");
    }
    return { at: placeOf(pin), kind, group, label };
  });
}

function drawLegend(all, circle) {
  legend.replaceChildren();
  for (const kind of Object.values(KINDS).reverse()) {
    const same = all.filter((pin) => kindOf(pin) === kind);
    if (!same.length) continue;
    const item = html(legend, "li");
    const icon = svg(item, "svg", { viewBox: kind.lift ? "-14 -30 28 32" : "-15 -15 30 30" });
    icon.setAttribute("aria-hidden", true);
    symbol(icon, kind);
    const name = same.length > 1 ? `${kind.many ?? kind.name} (${same.length})` : kind.name;
    const label = same.length === 1 ? textOf(same[0]) : "";
    html(item, "span", {}, label && label !== name ? `${name}: ${label}` : name);
  }
  if (!circle) return;
  const item = html(legend, "li");
  const icon = svg(item, "svg", { viewBox: "-15 -15 30 30", "aria-hidden": true });
  svg(icon, "path", { class: "area", d: dot(12) });
  svg(icon, "path", { class: "rim", d: dot(12) });
  html(item, "span", {}, `Spread of the samples: ${Math.round(circle.km).toLocaleString("en")} km`);
}

// ---- drawing: at most once a frame ----------------------------------------------------------

let waiting = 0;
function later() {
  waiting ||= requestAnimationFrame(() => {
    waiting = 0;
    if (width) draw();
  });
}

function draw() {
  const [left, top] = toScreen([0, 0]);
  globe.setAttribute("transform", `translate(${left} ${top}) scale(${scale()})`);
  for (const { at, group } of marks) group.setAttribute("transform", `translate(${toScreen(at)})`);
  placeLabels();
  cross.style.display = aim && canPick() ? "" : "none";
  if (aim) cross.setAttribute("transform", `translate(${toScreen(aim)})`);
  if (props.tiles) drawTiles();
}

// Puts each label beside its pin, where it covers neither a pin nor another label, or nowhere.
function placeLabels() {
  const boxes = marks.map(({ at, kind }) => {
    const [x, y] = toScreen(at);
    const r = kind.radius ?? 11;
    return { x: x - r, y: y - r - (kind.lift ? 16 : 0), w: 2 * r, h: 2 * r + (kind.lift ? 6 : 0) };
  });
  const panel = { x: 0, y: height - buttons.offsetHeight - 12, w: buttons.offsetWidth + 12, h: 999 };
  boxes.push(panel);
  const free = (box) =>
    box.x > 0 && box.x + box.w < width && box.y > 0 && box.y + box.h < height &&
    !boxes.some(
      (b) => b.x < box.x + box.w && box.x < b.x + b.w && b.y < box.y + box.h && box.y < b.y + b.h,
    );
  for (const { at, kind, label } of [...marks].reverse()) {
    if (!label) continue;
    const w = label.getComputedTextLength();
    const [x, y] = toScreen(at);
    const middle = y - (kind.lift ?? 0);
    const box = [
      { x: x + 16, y: middle - 9, w, h: 18 },
      { x: x - 16 - w, y: middle - 9, w, h: 18 },
      { x: x - w / 2, y: y + 14, w, h: 18 },
      { x: x - w / 2, y: middle - 32, w, h: 18 },
    ].find(free);
    label.style.visibility = box ? "" : "hidden";
    if (!box) continue;
    boxes.push(box);
    label.setAttribute("x", box.x);
    label.setAttribute("y", box.y + 13);
  }
}

// Draws the image tiles that the view needs. One that fails leaves the drawn land in sight.
const loaded = new Map(); // "z/x/y" -> its image
function drawTiles() {
  const [x0, y0] = toMap(0, 0);
  const [x1, y1] = toMap(width, height);
  const wanted = new Map();
  for (let z = Math.max(0, Math.round(Math.log2((scale() * size) / 256))); z >= 0; z--) {
    const side = size / 2 ** z;
    const last = 2 ** z - 1;
    wanted.clear();
    for (let x = Math.floor(x0 / side); x <= Math.min(last, Math.floor(x1 / side)); x++)
      for (let y = Math.floor(y0 / side); y <= Math.min(last, Math.floor(y1 / side)); y++)
        if (x >= 0 && y >= 0) wanted.set(`${z}/${x}/${y}`, [z, x, y, side]);
    if (wanted.size <= MAX_TILES) break;
  }
  for (const [name, image] of loaded)
    if (!wanted.has(name)) {
      image.remove();
      loaded.delete(name);
    }
  clearTimeout(asking);
  asking = setTimeout(() => ask(wanted), 150); // not for every step of a zoom
}

let asking = 0;
function ask(wanted) {
  for (const [name, [z, x, y, side]] of wanted) {
    if (loaded.has(name)) continue;
    const href = props.tiles.replace("{z}", z).replace("{x}", x).replace("{y}", y);
    const box = { href, x: x * side, y: y * side, width: side, height: side };
    const image = svg(tiles, "image", { ...box, preserveAspectRatio: "none" });
    image.addEventListener("error", () => image.remove());
    loaded.set(name, image);
  }
}

// ---- the person's pin -----------------------------------------------------------------------

function canPick() {
  return Boolean(props.clickable && !props.value?.locked);
}

function pick([x, y]) {
  if (!canPick()) return;
  const place = unproject(x, between(0, y, size));
  const value = props.value && typeof props.value === "object" ? props.value : {};
  click = { picked: JSON.stringify(place), turn: Math.floor(x / size) * size };
  props.value = { ...value, picked: place };
  update();
  const side = (number, plus, minus) =>
    `${Math.abs(number).toFixed(1)}° ${number < 0 ? minus : plus}`;
  said.textContent = `Pin at ${side(place.lat, "north", "south")}, ${side(place.lon, "east", "west")}`;
  trigger("select", { index: null, value: place });
}

const pointers = new Map(); // of each finger, or of the mouse: where it was last
let dragged = false;

function position(event) {
  const box = frame.getBoundingClientRect();
  return [event.clientX - box.left - frame.clientLeft, event.clientY - box.top - frame.clientTop];
}

frame.addEventListener("pointerdown", (event) => {
  if (event.button !== 0) return;
  dragged = pointers.size > 0; // a second finger makes it a pinch, which drops no pin
  pointers.set(event.pointerId, position(event));
  frame.setPointerCapture(event.pointerId);
  aim = null;
  later();
});

frame.addEventListener("pointermove", (event) => {
  const before = pointers.get(event.pointerId);
  if (!before) return;
  const [x, y] = position(event);
  const [dx, dy] = [x - before[0], y - before[1]];
  if (!dragged && Math.hypot(dx, dy) < DRAG) return;
  dragged = true;
  frame.classList.add("dragging");
  pointers.set(event.pointerId, [x, y]);
  if (pointers.size === 1) return pan(dx, dy);
  const [id] = [...pointers.keys()].filter((other) => other !== event.pointerId);
  const still = pointers.get(id);
  const apart = ([ax, ay]) => Math.max(1, Math.hypot(ax - still[0], ay - still[1]));
  zoom(apart([x, y]) / apart(before), (x + still[0]) / 2, (y + still[1]) / 2);
  pan(dx / 2, dy / 2);
});

function release(event) {
  const known = pointers.delete(event.pointerId);
  if (known && event.type === "pointerup" && !dragged) pick(toMap(...position(event)));
  if (!pointers.size) frame.classList.remove("dragging");
}
frame.addEventListener("pointerup", release);
frame.addEventListener("pointercancel", release);

frame.addEventListener(
  "touchstart",
  (event) => event.touches.length > 1 && event.preventDefault(), // a pinch zooms the map alone
  { passive: false },
);

frame.addEventListener(
  "wheel",
  (event) => {
    if (event.deltaY >= 0 && view.zoom <= least()) return; // the page scrolls on past the map
    event.preventDefault();
    const lines = event.deltaMode === 1 ? 16 : 1;
    zoom(Math.exp(-between(-300, event.deltaY * lines, 300) / 400), ...position(event));
  },
  { passive: false },
);

// ---- the keyboard ---------------------------------------------------------------------------

// Shows the cross-hair, where it was or in the middle, and returns where on the screen it stands.
function takeAim() {
  const [x, y] = aim ? toScreen(aim) : [NaN, NaN];
  const seen = x > -1 && y > -1 && x < width + 1 && y < height + 1; // the edge itself is seen
  if (!seen) aim = toMap(width / 2, height / 2);
  later();
  return seen ? [x, y] : [width / 2, height / 2];
}

function moveAim(dx, dy) {
  const [x, y] = takeAim();
  const [mapX, mapY] = toMap(x + dx, y + dy);
  aim = [between(-PAD, mapX, size + PAD), between(0, mapY, size)];
  const [nextX, nextY] = toScreen(aim);
  const edge = 2 * STEP; // nearer to the view's edge than this, the map moves along
  pan(
    between(edge, nextX, width - edge) - nextX,
    between(edge, nextY, height - edge) - nextY,
  );
}

function move(dx, dy, fine) {
  const step = fine ? STEP / 10 : STEP;
  if (canPick()) moveAim(dx * step, dy * step);
  else pan(-3 * dx * step, -3 * dy * step);
}

const centre = () => (canPick() ? takeAim() : [width / 2, height / 2]);
const drop = () => {
  takeAim();
  pick(aim);
};
const KEYS = {
  ArrowLeft: (fine) => move(-1, 0, fine),
  ArrowRight: (fine) => move(1, 0, fine),
  ArrowUp: (fine) => move(0, -1, fine),
  ArrowDown: (fine) => move(0, 1, fine),
  "+": () => zoom(2, ...centre()),
  "=": () => zoom(2, ...centre()), // the key of + without Shift
  "-": () => zoom(0.5, ...centre()),
  0: () => home(),
  Enter: drop,
  " ": drop,
};

frame.addEventListener("keydown", (event) => {
  const known = Object.hasOwn(KEYS, event.key) && !event.ctrlKey && !event.metaKey && !event.altKey;
  const drops = event.key === "Enter" || event.key === " ";
  if (!known || (drops && !canPick())) return;
  event.preventDefault();
  KEYS[event.key](event.shiftKey);
});
frame.addEventListener("focus", () => frame.matches(":focus-visible") && takeAim());
frame.addEventListener("blur", () => {
  aim = null;
  later();
});

// ---- begin ----------------------------------------------------------------------------------

new ResizeObserver(() => {
  const first = !width;
  [width, height] = [frame.clientWidth, frame.clientHeight];
  if (!width) return;
  if (fitWhenSeen) fit();
  else if (first) home();
  else look({});
}).observe(frame);
watch("value", update);
update();
