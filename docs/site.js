{
  // The search reads a leading dash as "without": look for all the words of an option instead.
  const field = document.querySelector(".md-search__input")
  const { get, set } = Object.getOwnPropertyDescriptor(HTMLInputElement.prototype, "value")
  const words = (option) => option.match(/\w+/g).map((word) => `+${word}*`).join(" ")
  Object.defineProperty(field, "value", {
    get() { return get.call(this).replace(/(?<!\S)--?\w[\w-]*/g, words) },
    set(text) { set.call(this, text) },
  })
}
