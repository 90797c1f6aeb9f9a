// Charts under the pointer: the nearest row of their data is shown, a drag zooms, a double click undoes it.
const scale = ([from, to], [start, end]) => (value) => start + (value - from) / (to - from) * (end - start);
const isIn = ([low, high], value) => value >= low && value <= high;
const sorted = (values) => [...values].sort((one, other) => one - other);
const number = (tick) => Number(tick.textContent.trim().replaceAll(",", "").replace("\u2212", "-"));
const roundValues = ([low, high]) => {
  const power = 10 ** Math.floor(Math.log10((high - low) / 4));
  const step = power * [1, 2, 5, 10].find((times) => times * power >= (high - low) / 4);
  return Array.from({ length: 6 }, (_, at) => (Math.ceil(low / step) + at) * step);
};
// Show a range of a panel: curves are stretched, their round markers are not, and there are new ticks.
const show = (panel, range) => {
  const { group, layer, box, whole } = Object.assign(panel, { range });
  const [left, right] = range.x.map(scale(whole.x, box.x)), [low, high] = range.y.map(scale(whole.y, box.y));
  layer.setAttribute("viewBox", `${left} ${high} ${right - left} ${low - high}`);
  const across = (right - left) / (box.x[1] - box.x[0]), down = (low - high) / (box.y[0] - box.y[1]);
  for (const mark of layer.querySelectorAll("use")) {
    mark.style.transformOrigin = `${mark.getAttribute("x")}px ${mark.getAttribute("y")}px`;
    mark.style.transform = `scale(${across}, ${down})`;
  }
  group.querySelectorAll(".tick").forEach((tick) => tick.remove());
  for (const axis of ["x", "y"]) {
    const place = scale(range[axis], box[axis]), placeBefore = scale(whole[axis], box[axis]);
    const put = (tick, from, to) => {
      tick.style.transform = `translate${axis}(${place(to) - placeBefore(from)}px)`;
      tick.style.display = isIn(range[axis], to) ? "" : "none";
    };
    const ticks = [...group.querySelectorAll(`[id*="-${axis}tick_"]:has(text)`)];
    const isNamed = ticks.some((tick) => isNaN(number(tick)));
    if (isNamed) ticks.forEach((tick, at) => put(tick, at + 0.5, at + 0.5)); // in the middle of their parts
    for (const tick of isNamed ? [] : ticks) tick.style.display = range === whole ? "" : "none";
    for (const value of range === whole || isNamed || !ticks[0] ? [] : roundValues(range[axis])) {
      const tick = group.insertBefore(ticks[0].cloneNode(true), layer);
      tick.classList.add("tick");
      const text = Number(value.toPrecision(6)).toLocaleString("en", { maximumFractionDigits: 9 });
      tick.querySelector("text").textContent = text;
      put(tick, number(ticks[0]), value);
    }
  }
};
for (const svg of document.querySelectorAll("svg[data-x]")) {
  const figure = svg.closest("figure"), points = JSON.parse(svg.dataset.x);
  const head = figure.querySelectorAll("thead th"), rows = figure.querySelectorAll("tbody tr");
  const panels = JSON.parse(svg.dataset.panels).map(([x, y, right, bottom, x0, x1, y0, y1], at) => {
    const group = svg.querySelector(`g[id$="-axes_${at + 1}"]`);
    const curves = [...group.children].filter((part) => /-(line2d|\w*Collection)_\d+$/.test(part.id));
    const size = `x="${x}" y="${y}" width="${right - x}" height="${bottom - y}"`;
    group.insertAdjacentHTML("beforeend", `<svg ${size} preserveAspectRatio="none"></svg>`);
    const layer = group.lastElementChild;
    layer.append(...curves);
    return { group, layer, box: { x: [x, right], y: [bottom, y] }, whole: { x: [x0, x1], y: [y0, y1] } };
  });
  svg.insertAdjacentHTML("beforeend", '<path class="cursor"/><path class="frame"/>');
  const [line, frame] = [...svg.children].slice(-2), tip = figure.querySelector(".tip");
  let start = null;
  const hide = () => [line, frame, tip].forEach((node) => { node.style.display = "none"; });
  const reset = () => panels.forEach((panel) => show(panel, panel.whole));
  const at = (event) => new DOMPoint(event.x, event.y).matrixTransform(svg.getScreenCTM().inverse());
  const point = (event) => {
    const { box, range } = panels[0], pointed = scale(box.x, range.x)(at(event).x);
    const far = points.map((one) => Math.abs(one - pointed)), row = far.indexOf(Math.min(...far));
    const layer = Number(event.target.closest('[id*="Collection_"]')?.id.match(/\d+$/)[0]);
    tip.replaceChildren(...Array.from(rows[row].cells, ({ textContent: cell }, at) => {
      const part = document.createElement(at === layer ? "b" : "span");
      part.textContent = `${head[at].textContent} ${cell}`;
      return /^(0 B)?$/.test(cell) ? "" : part;
    }));
    line.setAttribute("d", `M${scale(range.x, box.x)(points[row])} ${box.y[1]}V${panels.at(-1).box.y[0]}`);
    line.style.display = tip.style.display = isIn(range.x, points[row]) ? "block" : "none";
    const page = figure.getBoundingClientRect(), left = event.clientX - page.left;
    tip.style.left = `${left < page.width / 2 ? left + 14 : left - tip.offsetWidth - 14}px`;
    tip.style.top = `${event.clientY - page.top + 14}px`;
  };
  // The panel that a drag began in, and what of it was drawn over: its whole height by a flat drag.
  const dragged = (event) => {
    const end = at(event), panel = panels.find(({ box }) => start.y <= box.y[0]) ?? panels[0];
    const within = (axis) => (place) => sorted([place, ...panel.box[axis]])[1];
    const [x, y] = ["x", "y"].map((axis) => sorted([start[axis], end[axis]]).map(within(axis)));
    return { panel, x, y: y[1] - y[0] < 20 ? sorted(panel.box.y) : y };
  };
  reset();
  svg.onpointerleave = () => { start = null; hide(); };
  svg.ondblclick = reset;
  svg.onpointerdown = (event) => { start = event.button || event.pointerType !== "mouse" ? null : at(event); };
  svg.onpointermove = (event) => {
    if (start === null) return point(event);
    const { x, y } = dragged(event);
    frame.setAttribute("d", `M${x[0]} ${y[0]}H${x[1]}V${y[1]}H${x[0]}Z`);
    frame.style.display = "block";
  };
  svg.onpointerup = (event) => {
    if (start === null) return;
    const { panel, x, y } = dragged(event), { box, range } = panel;
    svg.onpointerleave();
    const shown = { x: x.map(scale(box.x, range.x)), y: y.reverse().map(scale(box.y, range.y)) };
    if (x[1] - x[0] < 8) return;
    for (const one of panels) show(one, one === panel ? shown : { ...one.range, x: shown.x });
  };
}
