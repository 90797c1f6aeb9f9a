(() => {
  // Charts under the pointer: the nearest row of their data is shown, a drag zooms, a double click undoes it.
  const scale = ([from, to], [start, end]) => (value) => start + (value - from) / (to - from) * (end - start);
  const within = (value, ends) => value >= Math.min(...ends) && value <= Math.max(...ends);
  const number = (tick) => Number(tick.textContent.trim().replaceAll(",", "").replace("\u2212", "-"));
  const make = (name, parent, attributes) => {
    const node = parent.appendChild(document.createElementNS("http://www.w3.org/2000/svg", name));
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    return node;
  };
  const roundValues = ([low, high]) => {
    const rough = (high - low) / 4, power = 10 ** Math.floor(Math.log10(rough));
    const step = power * [1, 2, 5, 10].find((times) => times * power >= rough), first = Math.ceil(low / step);
    return Array.from({ length: Math.floor(high / step) - first + 1 }, (_, at) => (first + at) * step);
  };

  // Show a range of a panel: curves are stretched, their round markers are not, and the ticks are new ones.
  const show = (panel, range) => {
    const { group, layer, box, whole } = Object.assign(panel, { range });
    const [left, right] = range.x.map(scale(whole.x, box.x));
    const [bottom, top] = range.y.map(scale(whole.y, box.y));
    layer.setAttribute("viewBox", `${left} ${top} ${right - left} ${bottom - top}`);
    const across = (right - left) / (box.x[1] - box.x[0]), down = (bottom - top) / (box.y[0] - box.y[1]);
    for (const mark of layer.querySelectorAll("use")) {
      mark.style.transformOrigin = `${mark.getAttribute("x")}px ${mark.getAttribute("y")}px`;
      mark.style.transform = `scale(${across}, ${down})`;
    }
    group.querySelectorAll(".tick").forEach((tick) => tick.remove());
    for (const axis of ["x", "y"]) {
      const before = scale(whole[axis], box[axis]), after = scale(range[axis], box[axis]);
      const move = (tick, from, to) => {
        tick.style.transform = `translate${axis}(${to - from}px)`;
        tick.style.display = within(to, box[axis]) ? "" : "none";
      };
      const ticks = [...group.querySelectorAll(`[id*="-${axis}tick_"]`)].filter((one) => one.textContent.trim());
      const isNamed = ticks.some((tick) => isNaN(number(tick)));
      for (const tick of ticks) {
        const own = tick.getBBox(), middle = own.x + own.width / 2;
        if (isNamed) move(tick, middle, after(scale(box.x, whole.x)(middle)));
        else tick.style.display = range === whole ? "" : "none";
      }
      for (const value of range === whole || isNamed || !ticks[0] ? [] : roundValues(range[axis])) {
        const tick = group.insertBefore(ticks[0].cloneNode(true), layer);
        tick.classList.add("tick");
        const text = Number(value.toPrecision(9)).toLocaleString("en", { maximumSignificantDigits: 6 });
        tick.querySelector("text").textContent = text;
        move(tick, before(number(ticks[0])), after(value));
      }
    }
  };

  for (const svg of document.querySelectorAll("svg[data-x]")) {
    const figure = svg.closest("figure"), points = JSON.parse(svg.dataset.x);
    const [head, ...rows] = [...figure.querySelectorAll("tr")]
      .map((row) => [...row.cells].map((cell) => cell.textContent));
    const panels = JSON.parse(svg.dataset.panels).map(([left, top, right, bottom, x0, x1, y0, y1], at) => {
      const group = svg.querySelector(`g[id$="-axes_${at + 1}"]`);
      const curves = [...group.children].filter((part) => /-(line2d|\w*Collection)_\d+$/.test(part.id));
      const size = { x: left, y: top, width: right - left, height: bottom - top };
      const layer = make("svg", group, { ...size, preserveAspectRatio: "none" });
      layer.append(...curves);
      return { group, layer, box: { x: [left, right], y: [bottom, top] }, whole: { x: [x0, x1], y: [y0, y1] } };
    });
    const { x: across } = panels[0].box;
    const line = make("line", svg, { class: "cursor", y1: panels[0].box.y[1], y2: panels.at(-1).box.y[0] });
    const frame = make("path", svg, { class: "frame" });
    const tip = figure.querySelector(".tip") ?? figure.appendChild(document.createElement("div"));
    tip.className = "tip";
    let start = null;

    const hide = () => [line, frame, tip].forEach((node) => { node.style.display = "none"; });
    const reset = () => panels.forEach((panel) => show(panel, panel.whole));
    const at = (event) => {
      const seen = svg.getBoundingClientRect(), ratio = svg.viewBox.baseVal.width / seen.width;
      return { x: (event.clientX - seen.left) * ratio, y: (event.clientY - seen.top) * ratio };
    };
    const dragged = (event) => {
      const end = at(event), panel = panels.find(({ box }) => within(start.y, box.y)) ?? panels[0];
      const [x, y] = ["x", "y"].map((axis) => {
        const [low, high] = [...panel.box[axis]].sort((a, b) => a - b);
        return [start[axis], end[axis]].sort((a, b) => a - b).map((one) => Math.min(Math.max(one, low), high));
      });
      return { panel, x, y: y[1] - y[0] < 20 ? [...panel.box.y].reverse() : y };
    };
    const point = (event) => {
      const { range } = panels[0], pointed = scale(across, range.x)(at(event).x);
      const distances = points.map((one) => Math.abs(one - pointed));
      const row = distances.indexOf(Math.min(...distances)), place = scale(range.x, across)(points[row]);
      if (!within(place, across)) return;
      line.setAttribute("x1", place);
      line.setAttribute("x2", place);
      const layer = Number(event.target.closest('[id*="Collection_"]')?.id.match(/\d+$/)[0]);
      const parts = rows[row].map((cell, column) => {
        const part = document.createElement(column === layer ? "b" : "span");
        part.textContent = `${head[column]} ${cell}`;
        return /^(0 B)?$/.test(cell) ? "" : part;
      });
      tip.replaceChildren(...parts);
      line.style.display = tip.style.display = "block";
      const page = figure.getBoundingClientRect(), left = event.clientX - page.left;
      tip.style.left = `${left < page.width / 2 ? left + 14 : left - tip.offsetWidth - 14}px`;
      tip.style.top = `${event.clientY - page.top + 14}px`;
    };

    reset();
    svg.addEventListener("pointerleave", () => { if (start === null) hide(); });
    svg.addEventListener("pointerdown", (event) => {
      if (event.pointerType === "mouse" && event.button === 0) start = at(event);
      if (start !== null) svg.setPointerCapture(event.pointerId);
    });
    svg.addEventListener("pointermove", (event) => {
      if (start === null) return point(event);
      const { x, y } = dragged(event);
      frame.setAttribute("d", `M${x[0]} ${y[0]}H${x[1]}V${y[1]}H${x[0]}Z`);
      frame.style.display = "block";
    });
    svg.addEventListener("pointerup", (event) => {
      if (start === null) return;
      const { panel, x, y } = dragged(event);
      start = null;
      hide();
      if (x[1] - x[0] < 8) return;
      const columns = x.map(scale(panel.box.x, panel.range.x)), lines = y.map(scale(panel.box.y, panel.range.y));
      for (const one of panels) show(one, { x: columns, y: one === panel ? lines.reverse() : one.range.y });
    });
    svg.addEventListener("dblclick", reset);
  }
})();
