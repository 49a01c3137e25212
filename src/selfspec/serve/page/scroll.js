// Keeps the end of a growing element in view, unless the reader has scrolled away from it.

const NEAR = 80; // pixels from the end that still count as the end

/** Starts to follow. The function that it gives goes to the end, and follows again. */
export function followEnd(growing) {
  const page = document.scrollingElement;
  const toEnd = () => page.scrollTo({ top: page.scrollHeight });
  let following = true;
  window.addEventListener("scroll", () => {
    following = page.scrollHeight - page.clientHeight - page.scrollTop < NEAR;
  });
  new ResizeObserver(() => following && toEnd()).observe(growing);
  return () => {
    following = true;
    toEnd();
  };
}
