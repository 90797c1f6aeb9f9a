(() => {
  const box = document.currentScript.parentElement;
  const button = box.querySelector("button");
  const code = box.querySelector("code");
  const select = () => getSelection().selectAllChildren(code);
  const done = () => {
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  };
  button.hidden = false;
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(code.textContent);
      done();
    } catch {
      select();
      if (document.execCommand("copy")) done();
    }
  });
})();
