/* ---- scrolling ---- */

const root = document.documentElement;
let isAtEnd = true; // whether the view follows the end of the chat
let chatTop = 0; // scroll position of the chat when it was last shown

const hiddenBelow = () => root.scrollHeight - root.clientHeight - root.scrollTop;

/** Scroll to the end of the chat if the view follows it. */
function follow(always = false) {
  if ($("chat").hidden) return;
  if (always) isAtEnd = true;
  if (isAtEnd && !opened) root.scrollTop = root.scrollHeight;
  noteTop();
}

function noteTop() {
  chatTop = root.scrollTop;
  $("to-end").hidden = isAtEnd || hiddenBelow() < 200;
}

function scrolled() {
  hideTip();
  if ($("chat").hidden) return;
  if (hiddenBelow() < 8) isAtEnd = true;
  else if (root.scrollTop < chatTop) isAtEnd = false;
  noteTop();
}
