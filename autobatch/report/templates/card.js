(() => {
  // Save a card as a file: an SVG with the colours and the font of the page, or a PNG of it.
  const box = document.currentScript.parentElement, page = getComputedStyle(document.documentElement);
  const drawn = () => {
    const copy = box.closest("figure").querySelector("svg.wide").cloneNode(true);
    for (const node of copy.querySelectorAll("[style]")) {
      node.setAttribute("style", node.getAttribute("style").replace(
        /var\(--([\w-]+), ([^)]*)\)/g, (_, name, otherwise) => page.getPropertyValue(`--${name}`).trim() || otherwise));
    }
    const [, , width, height] = copy.getAttribute("viewBox").split(" ");
    copy.setAttribute("width", width);
    copy.setAttribute("height", height);
    return `data:image/svg+xml;charset=utf-8,${encodeURIComponent(new XMLSerializer().serializeToString(copy))}`;
  };
  const save = (href, ending) =>
    Object.assign(document.createElement("a"), { href, download: `autobatch-tuned.${ending}` }).click();
  const [asSvg, asPng] = box.querySelectorAll("button");
  asSvg.addEventListener("click", () => save(drawn(), "svg"));
  asPng.addEventListener("click", async () => {
    const image = Object.assign(new Image(), { src: drawn() });
    await image.decode();
    const [width, height] = [2 * image.width, 2 * image.height];
    const canvas = Object.assign(document.createElement("canvas"), { width, height });
    canvas.getContext("2d").drawImage(image, 0, 0, width, height);
    save(canvas.toDataURL(), "png");
  });
  box.hidden = !box.parentElement.querySelector("svg");
})();
